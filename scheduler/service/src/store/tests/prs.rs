use cfq_proto::http::PrFilter;
use cfq_proto::pr::PrState;

use super::rows_read::{add_tasks, rows_read, single_connection};
use super::*;

/// Maximum number of rows that reading one page of ten pull requests may read.
const FEW: i64 = 500;

/// Pull requests are listed by state, repository and time; a page costs the same whatever else is in the table.
#[tokio::test]
async fn page_of_pull_requests_reads_few_rows_in_a_large_table() {
    let env = TestEnv::new().await;
    add_tasks(&env, 20_000, "'merged'").await;
    // One task in a thousand has another repository; one pull request in a thousand was rejected. They were opened one
    // second after the other.
    env.store
        .raw(
            r#"update tasks set spec = jsonb_set(spec::jsonb, '{repo}', '"/home/rare"')::json where number % 1000 = 0;
               update tasks set spec = jsonb_set(spec::jsonb, '{repo}', '"/home/many"')::json where number % 1000 <> 0;
               insert into internal_prs (task, title, state, branch, head, base, repo_hash)
               select id, 'x', case when number % 1000 = 7 then 'qc_rejected' else 'merged' end, 'b', 'h', 'f',
                      md5(spec ->> 'repo')
               from tasks order by number;
               insert into task_labels (task, number, label) select id, number, 'common' from tasks;
               insert into task_labels (task, number, label) select id, number, 'rare' from tasks where number % 1000 = 3;
               insert into internal_pr_moves (pr, n, "to", reason, at)
               select number, 1, 'pending_qc', 'opened', to_timestamp(1000 + number) from internal_prs;
               analyze"#,
        )
        .await;
    let store = single_connection(&env);
    store.raw("select 1 from internal_prs, internal_pr_moves, tasks, task_labels limit 1").await;
    let newest = store.prs(&PrFilter::default(), 1).await.unwrap()[0].number;
    let filter = |change: &dyn Fn(&mut PrFilter)| {
        let mut filter = PrFilter::default();
        change(&mut filter);
        filter
    };
    let filters = [
        (filter(&|_| {}), 20),
        (filter(&|f| f.states = vec![PrState::QcRejected]), 20),
        (filter(&|f| f.repo = Some("/home/rare".into())), 20),
        (filter(&|f| f.repo = Some("/home/none".into())), 0),
        (filter(&|f| f.repo = Some("/home/many".into())), 20),
        (filter(&|f| (f.repo, f.states) = (Some("/home/many".into()), vec![PrState::QcRejected])), 20),
        (filter(&|f| f.states = vec![PrState::Merged, PrState::Merged]), 20),
        (filter(&|f| f.since = Some(1_000 + newest - 14)), 15),
        (filter(&|f| f.labels = vec!["rare".parse().unwrap()]), 20),
        (filter(&|f| f.labels = vec!["common".parse().unwrap(), "rare".parse().unwrap()]), 20),
        (filter(&|f| f.labels = vec!["rare".parse().unwrap(), "none".parse().unwrap()]), 0),
        (filter(&|f| f.since = Some(1_000 + newest + 1)), 0),
    ];
    let oldest = filters.clone().map(|(filter, expected)| (PrFilter { oldest_first: true, ..filter }, expected));
    for (mut filter, expected) in filters.into_iter().chain(oldest) {
        let mut seen = Vec::new();
        for _ in 0..2 {
            let (read, prs) = rows_read(&store, store.prs(&filter, 10)).await;
            // To find the rarest of several labels, at most 1,000 tasks of each are counted, through their index.
            let limit = if filter.labels.len() > 1 { FEW + 2 * 1_020 } else { FEW };
            assert!(read <= limit, "{read} rows read for {filter:?}");
            seen.extend(prs.unwrap().into_iter().map(|pr| pr.number));
            filter.after = seen.last().copied().or(filter.after);
        }
        assert_eq!(seen.len(), expected, "{filter:?}");
        assert!(seen.is_sorted_by(|a, b| (a > b) != filter.oldest_first), "{filter:?}: {seen:?}");
    }
}
