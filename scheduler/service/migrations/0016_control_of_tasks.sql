-- Control of tasks by users.
-- Author and reason of a pause that was requested while the task's runner executed a step; the task is paused after
-- that step. Null if no pause is requested.
alter table tasks add column pause_requested text;

-- Lists of tasks, and operations on many tasks: the tasks of one state and priority, in the order of their numbers. The
-- index is on the negative number, because Postgres would otherwise choose the index on the number, which finds few tasks
-- of a rare state among all tasks.
create index tasks_by_state on tasks (state, priority, (-number));

-- Number of the attempt after which a user requeued the job as a dead letter: attempts up to it count toward no limit.
alter table jobs add column requeued_after integer not null default 0;
