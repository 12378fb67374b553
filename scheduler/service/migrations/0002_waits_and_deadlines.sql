-- What is counted while a job waits: time beside live nodes of which none has its model.
alter table jobs add column no_node_ms bigint not null default 0;

-- Working time runs from the task's first token; an attempt that made one shows that the endpoint answers.
alter table jobs drop column started;
alter table attempts add column first_token_at timestamptz;
alter table tasks add column first_token_at timestamptz;

-- The sweep looks for passed deadlines every second.
create index tasks_due on tasks (deadline) where deadline is not null and state in ('ready', 'running');
