//! Tests of schedules.

use cfq_proto::ids::TaskKey;
use jiff::tz::TimeZone;

use super::super::{Hint, NewSchedule};
use super::*;
use crate::testing::new_task;

const MAKE_DUE: &str = "update schedules set next_at = date_trunc('hour', now()) - interval '2 hours'";

async fn add(env: &TestEnv, name: &str) {
    let (cron, zone) = ("0 * * * *".parse().unwrap(), TimeZone::get("Europe/Berlin").unwrap());
    let new = NewSchedule { name: name.into(), cron, time_zone: "Europe/Berlin".into(), zone, task: new_task(None) };
    assert!(env.store.add_schedule(&new).await.unwrap());
    assert!(!env.store.add_schedule(&new).await.unwrap(), "the name is taken");
}

#[tokio::test]
async fn due_schedule_fires_once_and_continues_on_its_grid() {
    let env = TestEnv::new().await;
    let leadership = env.acquire_leadership().await;
    add(&env, "hourly").await;
    assert_eq!(env.store.fire_schedules(leadership).await.unwrap(), vec![], "it is not due");
    env.store.raw(MAKE_DUE).await;
    // Two sweeps at once: the second one waits for the lock on the schedule and finds that it is not due.
    let (one, two) = tokio::join!(env.store.fire_schedules(leadership), env.store.fire_schedules(leadership));
    assert_eq!([one.unwrap(), two.unwrap()].concat(), [Hint::TaskReady]);
    let on_grid = "select count(*) from tasks join schedules on schedules.id = tasks.schedule
                   where scheduled_at = date_trunc('hour', now()) - interval '2 hours' and last_at = scheduled_at
                     and last_task = tasks.number and next_at = date_trunc('hour', now()) + interval '1 hour'";
    assert_eq!(env.store.count(on_grid).await, 1);
    // An instant that has fired does not fire again, even if the schedule is set back to it.
    env.store.raw(MAKE_DUE).await;
    assert_eq!(env.store.fire_schedules(leadership).await.unwrap(), vec![]);
    assert_eq!(env.store.count("select count(*) from tasks").await, 1);
    assert_eq!(env.store.count(on_grid).await, 1, "and the schedule continues");
}

#[tokio::test]
async fn deposed_leader_fires_nothing_and_a_removed_schedule_keeps_its_tasks() {
    let env = TestEnv::new().await;
    let old = env.acquire_leadership().await;
    add(&env, "hourly").await;
    add(&env, "paused").await;
    env.store.raw("update leader set expires_at = now() - interval '1 second'").await;
    let leadership = env.acquire_leadership().await;
    env.store.raw(MAKE_DUE).await;
    assert!(env.store.pause_schedule("paused").await.unwrap());
    assert!(matches!(env.store.fire_schedules(old).await, Err(super::super::StoreError::NotLeader { .. })));
    assert_eq!(env.store.count("select count(*) from tasks").await, 0);
    assert_eq!(env.store.fire_schedules(leadership).await.unwrap(), vec![Hint::TaskReady]);
    assert!(env.store.resume_schedule("paused").await.unwrap());
    assert_eq!(env.store.fire_schedules(leadership).await.unwrap(), vec![], "it continues in the future");
    assert!(env.store.remove_schedule("hourly").await.unwrap() && !env.store.remove_schedule("hourly").await.unwrap());
    assert!(env.store.find_task(TaskKey::Number(cfq_proto::ids::TaskNumber(1))).await.unwrap().is_some());
}

#[tokio::test]
async fn schedule_stays_due_while_the_limit_on_open_tasks_is_reached() {
    let env = TestEnv::new().await;
    let leadership = env.acquire_leadership().await;
    add(&env, "hourly").await;
    env.store.raw(MAKE_DUE).await;
    let (waiting, _) = env.submit().await;
    let limits = crate::config::SchedulerLimits { open_tasks: 1, ..Default::default() };
    let full = Store::new(&env.database, env.store.timing.clone(), limits).unwrap();
    assert_eq!(full.fire_schedules(leadership).await.unwrap(), vec![]);
    full.cancel(waiting, "a test", Run::Commit).await.unwrap();
    assert_eq!(full.fire_schedules(leadership).await.unwrap(), vec![Hint::TaskReady]);
}
