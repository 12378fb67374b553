//! Reads internal pull requests, which are kept in cfq and not on a forge. A list reads the index on (state, -number) once
//! for each state, and that of a repository an index that begins with the hash of its path, so their cost does not grow
//! with the number of pull requests. A list by labels reads all tasks with one of the labels.

use std::collections::BTreeMap;

use cfq_proto::http::{PrFilter, PrMove, PrView};
use cfq_proto::ids::TaskNumber;
use cfq_proto::label::Label;
use cfq_proto::pr::PrState;
use cfq_proto::review::CheckRun;
use sqlx::types::Json;

use super::columns::parse;
use super::error::Doing;
use super::{Store, StoreError};

/// Number of pull requests that are opened at the same time, whose numbers may be in another order than their times.
const CONCURRENT_OPENINGS: i64 = 200;

/// The states and numbers of the pull requests that are listed.
struct Range {
    states: Vec<&'static str>,
    /// First and last number.
    first: i64,
    last: i64,
    /// Length of the list.
    limit: i64,
}

/// The numbers of the pull requests in a range: each state is read through its index, in the order of `-number` with
/// `$part`, then all in the order of the number with `$whole`.
macro_rules! prs_in_states {
    ($condition:literal, $part:literal, $whole:literal, $range:expr, $store:expr $(, $repo:expr)?) => {
        sqlx::query_scalar!(
            r#"select p.number as "number!"
               from unnest($1::text[]) as wanted (state),
                    lateral (select number from internal_prs
                             where "# + $condition + r#" internal_prs.state = wanted.state
                               and -internal_prs.number between -$3::bigint and -$2::bigint
                             order by -internal_prs.number "# + $part + r#" limit $4) as p
               order by p.number "# + $whole + " limit $4",
            &$range.states as &[&str],
            $range.first,
            $range.last,
            $range.limit
            $(, $repo)?
        )
        .fetch_all(&$store.pool)
        .await
    };
}

impl Store {
    /// The internal pull request `number`; `None` if there is none.
    pub async fn pr(&self, number: i64) -> Result<Option<PrView>, StoreError> {
        Ok(self.read_prs(&[number]).await?.pop())
    }

    /// The first `limit` internal pull requests that match the filter, in its order. The limit of the filter is not used.
    pub async fn prs(&self, filter: &PrFilter, limit: i64) -> Result<Vec<PrView>, StoreError> {
        let mut prs = self.read_prs(&self.find_prs(filter, limit).await?).await?;
        if filter.oldest_first {
            prs.reverse();
        }
        Ok(prs)
    }

    /// The numbers of the first `limit` internal pull requests that match the filter, in its order.
    pub async fn find_prs(&self, filter: &PrFilter, limit: i64) -> Result<Vec<i64>, StoreError> {
        let mut first = match filter.since {
            Some(since) => self.first_pr_since(since).await?,
            None => 0,
        };
        let mut last = i64::MAX;
        match filter.after {
            Some(after) if filter.oldest_first => first = first.max(after.saturating_add(1)),
            Some(after) => last = after.saturating_sub(1),
            None => {}
        }
        let states = if filter.states.is_empty() { &PrState::ALL[..] } else { &filter.states };
        let mut states: Vec<&str> = states.iter().map(|state| state.as_str()).collect();
        states.sort_unstable();
        states.dedup();
        let range = Range { states, first, last, limit };
        if !filter.labels.is_empty() {
            return self.labelled_prs(filter, &range).await;
        }
        let repo = filter.repo.as_deref();
        let numbers = match (repo, filter.oldest_first) {
            (Some(repo), false) => prs_in_states!("repo_hash = md5($5::text) and", "", "desc", &range, self, repo),
            (Some(repo), true) => prs_in_states!("repo_hash = md5($5::text) and", "desc", "", &range, self, repo),
            (None, false) => prs_in_states!("", "", "desc", &range, self),
            (None, true) => prs_in_states!("", "desc", "", &range, self),
        };
        numbers.doing("listing pull requests")
    }

    /// As [`Store::find_prs`], for a filter with labels: reads all tasks with the label that the fewest tasks have.
    async fn labelled_prs(&self, filter: &PrFilter, range: &Range) -> Result<Vec<i64>, StoreError> {
        let mut labels: Vec<&str> = filter.labels.iter().map(Label::as_str).collect();
        labels.sort_unstable();
        labels.dedup();
        let mut numbers = sqlx::query_scalar!(
            r#"select p.number from task_labels l join internal_prs p on p.task = l.task
               where l.label = $1 and p.state = any($2) and p.number between $3 and $4
                 and ($5::text is null or p.repo_hash = md5($5))
                 and (select count(*) from task_labels other where other.task = l.task and other.label = any($6))
                     = cardinality($6::text[])
               order by case when $8 then p.number else -p.number end limit $7"#,
            self.rarest_label(&labels).await?,
            &range.states as &[&str],
            range.first,
            range.last,
            filter.repo,
            &labels as &[&str],
            range.limit,
            filter.oldest_first
        )
        .fetch_all(&self.pool)
        .await
        .doing("listing labelled pull requests")?;
        numbers.sort_unstable_by(|a, b| if filter.oldest_first { a.cmp(b) } else { b.cmp(a) });
        Ok(numbers)
    }

    /// The smallest number of the pull requests that were opened at this time or later; `i64::MAX` if there is none.
    async fn first_pr_since(&self, since: i64) -> Result<i64, StoreError> {
        let number = sqlx::query_scalar!(
            "select min(pr) from (select pr from internal_pr_moves where n = 1 and at >= to_timestamp($1::bigint)
                                  order by at limit $2) as first",
            since,
            CONCURRENT_OPENINGS
        )
        .fetch_one(&self.pool)
        .await
        .doing("finding the first pull request since a time")?;
        Ok(number.unwrap_or(i64::MAX))
    }

    /// The pull requests with these numbers, newest first.
    async fn read_prs(&self, numbers: &[i64]) -> Result<Vec<PrView>, StoreError> {
        let rows = sqlx::query!(
            r#"select p.number, t.number as task, p.title, p.state, p.branch, p.head, p.base, p.merge_commit,
                      p.merge_checks as "merge_checks: Json<Vec<CheckRun>>"
               from internal_prs p join tasks t on t.id = p.task
               where p.number = any($1) order by p.number desc"#,
            numbers
        )
        .fetch_all(&self.pool)
        .await
        .doing("reading pull requests")?;
        let moves = sqlx::query!(
            r#"select pr, "to", reason, extract(epoch from at)::float8 as "at!" from internal_pr_moves
               where pr = any($1) order by pr, n"#,
            numbers
        )
        .fetch_all(&self.pool)
        .await
        .doing("reading pull requests")?;
        let mut history: BTreeMap<i64, Vec<PrMove>> = BTreeMap::new();
        for m in moves {
            let to = parse("pull request state", &m.to)?;
            history.entry(m.pr).or_default().push(PrMove { to, reason: m.reason, at: m.at });
        }
        rows.into_iter()
            .map(|r| {
                Ok(PrView {
                    number: r.number,
                    task: TaskNumber(r.task),
                    title: r.title,
                    state: parse("pull request state", &r.state)?,
                    branch: r.branch,
                    head: r.head,
                    base: r.base,
                    // Those of a merge that was planned and not carried out do not matter.
                    merge_checks: r.merge_commit.as_ref().map_or_else(Vec::new, |_| r.merge_checks.0),
                    merge_commit: r.merge_commit,
                    history: history.remove(&r.number).unwrap_or_default(),
                })
            })
            .collect()
    }
}
