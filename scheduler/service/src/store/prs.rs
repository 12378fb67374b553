//! Reads internal pull requests, which are kept in cfq and not on a forge. A list reads the index on (state, -number) once
//! for each state, and that of a repository an index that begins with the hash of its path, so their cost does not grow
//! with the number of pull requests.

use std::collections::BTreeMap;

use cfq_proto::http::{PrFilter, PrMove, PrView};
use cfq_proto::ids::TaskNumber;
use cfq_proto::pr::PrState;
use cfq_proto::review::CheckRun;
use sqlx::types::Json;

use super::columns::parse;
use super::error::Doing;
use super::{Store, StoreError};

/// Number of pull requests that are opened at the same time, whose numbers may be in another order than their times.
const CONCURRENT_OPENINGS: i64 = 200;

impl Store {
    /// The internal pull request `number`; `None` if there is none.
    pub async fn pr(&self, number: i64) -> Result<Option<PrView>, StoreError> {
        Ok(self.read_prs(&[number]).await?.pop())
    }

    /// The first `limit` internal pull requests that match the filter, newest first. The limit of the filter is not used.
    pub async fn prs(&self, filter: &PrFilter, limit: i64) -> Result<Vec<PrView>, StoreError> {
        let first = match filter.since {
            Some(since) => self.first_pr_since(since).await?,
            None => 0,
        };
        let last = filter.after.map_or(i64::MAX, |after| after.saturating_sub(1));
        let states = if filter.states.is_empty() { &PrState::ALL[..] } else { &filter.states };
        let mut states: Vec<&str> = states.iter().map(|state| state.as_str()).collect();
        states.sort_unstable();
        states.dedup();
        let numbers = match &filter.repo {
            Some(repo) => {
                sqlx::query_scalar!(
                    r#"select p.number as "number!"
                       from unnest($2::text[]) as wanted (state),
                            lateral (select number from internal_prs
                                     where internal_prs.repo_hash = md5($1::text) and internal_prs.state = wanted.state
                                       and -internal_prs.number between -$4::bigint and -$3::bigint
                                     order by -internal_prs.number limit $5) as p
                       order by p.number desc limit $5"#,
                    repo,
                    &states as &[&str],
                    first,
                    last,
                    limit
                )
                .fetch_all(&self.pool)
                .await
            }
            None => {
                sqlx::query_scalar!(
                    r#"select p.number as "number!"
                       from unnest($1::text[]) as wanted (state),
                            lateral (select number from internal_prs
                                     where internal_prs.state = wanted.state
                                       and -internal_prs.number between -$3::bigint and -$2::bigint
                                     order by -internal_prs.number limit $4) as p
                       order by p.number desc limit $4"#,
                    &states as &[&str],
                    first,
                    last,
                    limit
                )
                .fetch_all(&self.pool)
                .await
            }
        };
        self.read_prs(&numbers.doing("listing pull requests")?).await
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
