-- Tasks that only review a change end as reviewed.
alter table tasks drop constraint tasks_state_check;
alter table tasks add constraint tasks_state_check
    check (state in ('call', 'queued', 'blocked', 'ready', 'running', 'waiting_on_human', 'paused', 'escalated', 'merged',
                     'accepted', 'reviewed', 'failed', 'cancelled'));

-- When a user said that they know of a task's failure. The failures before this version count as known.
alter table tasks add column acknowledged_at timestamptz;
update tasks set acknowledged_at = now() where state = 'failed';
create index tasks_failed on tasks (id) where state = 'failed' and acknowledged_at is null;

-- Defects that users found in the results of tasks after the hand-off.
create table defects (
    id            uuid primary key,
    task          uuid not null references tasks,
    severity      text not null check (severity in ('critical', 'major', 'minor', 'info')),
    location      text not null,
    description   text not null,
    suggested_fix text,
    reported_at   timestamptz not null default now(),
    unique (task, location, description)
);
