-- Order in which ready tasks are granted: the time of creation plus ten minutes for each priority class. A deadline brings
-- a task forward, by at most ten minutes, to ten minutes before the deadline. The order of two tasks never changes, so an
-- index finds the first task.
alter table tasks add column order_key timestamptz not null default now();
update tasks set order_key = greatest(created_at + priority * interval '10 minutes' - interval '10 minutes',
                                      least(created_at + priority * interval '10 minutes', deadline - interval '10 minutes'))
where state not in ('merged', 'accepted', 'failed', 'cancelled');

-- The job that a ready task waits for; null as soon as the job is not pending any more.
update tasks set waits_for = null
where waits_for is not null
  and not exists (select from jobs where jobs.id = tasks.waits_for and jobs.state in ('queued', 'placed'));
drop index tasks_ready;
create index tasks_ready on tasks (order_key, number) where state = 'ready' and waits_for is null;

-- Tasks and jobs that have not ended; dead jobs are parked, because a user may still look at them.
create index tasks_open on tasks (state)
    where state in ('queued', 'blocked', 'ready', 'running', 'waiting_on_human', 'paused', 'escalated');
create index jobs_open on jobs (state, created_at) where state in ('queued', 'placed', 'running', 'dead');
drop index jobs_live;

-- Retention: ended tasks are found by the time of their end. Rows that refer to a task or job are found by it.
alter table tasks add column ended_at timestamptz;
update tasks set ended_at = updated_at where state in ('merged', 'accepted', 'failed', 'cancelled');
create index tasks_ended on tasks (ended_at) where ended_at is not null;
-- Tasks that an earlier version of cfq ended.
create index tasks_ended_unmarked on tasks (id)
    where ended_at is null and state in ('merged', 'accepted', 'failed', 'cancelled');
alter table tasks drop constraint tasks_retry_of_fkey,
    add constraint tasks_retry_of_fkey foreign key (retry_of) references tasks on delete set null;
create index tasks_by_retry_of on tasks (retry_of) where retry_of is not null;
alter table tasks drop constraint tasks_waits_for_fkey,
    add constraint tasks_waits_for_fkey foreign key (waits_for) references jobs on delete set null;
create index tasks_by_waits_for on tasks (waits_for) where waits_for is not null;
create index blob_refs_by_task on blob_refs (task);
create index questions_by_task on questions (task);

-- What a reader of the event feeds must know about positions that it received earlier.
create table event_feed (
    only_one    boolean primary key default true check (only_one),
    -- Part of every position; another one after the database was restored, because positions are then assigned again.
    epoch       text not null,
    -- True until the first restore: positions without an epoch, of earlier versions of cfq, belong to this epoch.
    is_first    boolean not null default true,
    -- The database to which the epoch belongs, so that a restored copy is noticed; null until the first start.
    database    text,
    -- Position of the last event, in the order of the feed, that was deleted.
    deleted_xid xid8 not null default '0',
    deleted_id  bigint not null default 0
);
insert into event_feed (epoch) values (substr(gen_random_uuid()::text, 1, 8));
