-- Dependencies between tasks: `task` may start after `predecessor` has ended well. Edges are inserted at the submit of
-- `task`, while its predecessors are locked. A retry of a failed predecessor takes over its edges.
create table task_dependencies (
    task        uuid not null references tasks,
    predecessor uuid not null references tasks,
    -- True if the predecessor ended, or the edge was added, after the task's state was last computed. Each end of a task
    -- sets it; the leader's sweep computes the task's state and clears it.
    due         boolean not null default true,
    primary key (task, predecessor)
);
create index task_dependencies_by_predecessor on task_dependencies (predecessor);
create index task_dependencies_due on task_dependencies (task) where due;

-- True if the task was raised by one priority class because several others wait for it.
alter table tasks add column is_bottleneck boolean not null default false;

-- Earliest start of the task. The leader's sweep finds the queued tasks whose time has come.
alter table tasks add column run_at timestamptz;
create index tasks_run_at on tasks (run_at) where state = 'queued';
