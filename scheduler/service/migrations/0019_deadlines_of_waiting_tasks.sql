-- The sweep ends tasks whose deadline passes while they wait for their time or for other tasks, too.
drop index tasks_due;
create index tasks_due on tasks (deadline)
    where deadline is not null and state in ('queued', 'blocked', 'ready', 'running');
