-- Schedules: tasks that are submitted at the times of a cron expression.
create table schedules (
    id             uuid primary key,
    name           text not null unique,
    cron           text not null,
    time_zone      text not null,
    spec           json not null,
    title          text not null,
    threshold      double precision not null,
    max_iterations integer not null,
    body_hash      text not null,
    -- Next instant; null while the schedule is paused.
    next_at        timestamptz,
    -- Instant for which the last task was created, and that task's number.
    last_at        timestamptz,
    last_task      bigint,
    created_at     timestamptz not null default now()
);
create index schedules_due on schedules (next_at) where next_at is not null;

-- The schedule that created the task, and the instant for which it did. An instant has at most one task. There is no
-- foreign key, because the removal of a schedule would then change all its tasks; ids are never used again.
alter table tasks add column schedule uuid, add column scheduled_at timestamptz;
create unique index tasks_of_schedule on tasks (schedule, scheduled_at) where schedule is not null;
