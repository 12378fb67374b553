use cfq_proto::http::JobFilter;

use super::rows_read::{add_tasks, rows_read, single_connection};
use super::*;

/// Maximum number of rows that reading one page of ten jobs may read.
const FEW: i64 = 500;

/// Each condition has an index, so a page costs the same whatever else is in the table.
#[tokio::test]
async fn page_of_jobs_reads_few_rows_in_a_large_table() {
    let env = TestEnv::new().await;
    add_tasks(&env, 20_000, "'merged'").await;
    // One job in a thousand failed, on another node and with another model than the others.
    env.store
        .raw(
            "insert into jobs (id, task, seq, role, n, model, priority, prompt, prompt_bytes, prefix, max_tokens, state,
                               node, attempt)
             select gen_random_uuid(), id, 0, 'alpha', 0, case when number % 1000 = 0 then 'path:/rare' else 'path:/m' end, 3,
                    '{}', 1, '[]', 1, case when number % 1000 = 0 then 'failed' else 'done' end,
                    case when number % 1000 = 0 then 'rare' else 'den' end, 1
             from tasks;
             analyze",
        )
        .await;
    let store = single_connection(&env);
    store.raw("select 1 from jobs limit 1").await;
    let filter = |change: &dyn Fn(&mut JobFilter)| {
        let mut filter = JobFilter::default();
        change(&mut filter);
        filter
    };
    let filters = [
        filter(&|_| {}),
        filter(&|f| f.states = vec![JobState::Failed]),
        filter(&|f| f.states = vec![JobState::Failed, JobState::Done]),
        filter(&|f| f.node = Some("rare".parse().unwrap())),
        filter(&|f| f.model = Some("path:/rare".parse().unwrap())),
    ];
    for mut filter in filters {
        let mut seen = Vec::new();
        for _ in 0..2 {
            let (read, jobs) = rows_read(&store, store.list_jobs(&filter, None, 10)).await;
            assert!(read <= FEW, "{read} rows read for {filter:?}");
            seen.extend(jobs.unwrap().into_iter().map(|job| job.id));
            filter.after = seen.last().copied();
        }
        assert_eq!(seen.len(), 20, "{filter:?}");
        assert!(seen.is_sorted_by(|a, b| a > b), "newest first: {seen:?}");
    }
}
