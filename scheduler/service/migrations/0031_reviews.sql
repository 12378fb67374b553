-- Tasks that only review a change end as reviewed.
alter table tasks drop constraint tasks_state_check;
alter table tasks add constraint tasks_state_check
    check (state in ('call', 'queued', 'blocked', 'ready', 'running', 'waiting_on_human', 'paused', 'escalated', 'merged',
                     'accepted', 'reviewed', 'failed', 'cancelled'));

-- When a user acknowledged the task's failure, or retried the task. The failures before this version count as
-- acknowledged.
alter table tasks add column acknowledged_at timestamptz;
update tasks set acknowledged_at = now() where state = 'failed';
create index tasks_failed on tasks (id) where state = 'failed' and acknowledged_at is null;

-- Defects that users found in the results of tasks after the hand-off.
create table reported_defects (
    id            uuid primary key,
    task          uuid not null references tasks,
    severity      text not null check (severity in ('critical', 'major', 'minor', 'info')),
    location      text not null,
    description   text not null,
    suggested_fix text,
    reported_at   timestamptz not null default now()
);
-- An index row cannot hold the texts.
create unique index reported_defects_once on reported_defects (task, md5(location), md5(description));
