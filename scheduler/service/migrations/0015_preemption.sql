-- The waiting task of P0 that gets the slot of this running task after the next step. It has no foreign key: a name that
-- is no longer needed is withdrawn by the leader or ends with the lease.
alter table tasks add column preempted_by uuid;

-- Whether the task was released with this step, so that a repeated request gets the same reply.
alter table steps add column released boolean not null default false;

-- Number of tasks that the runner drives at the same time; null if its version does not report it.
alter table runners add column slots integer;

-- The list of jobs is read newest first, by page; ids are ordered by the time of creation.
create index jobs_by_state on jobs (state, id);
create index jobs_by_node_and_id on jobs (node, id) where node is not null;
create index jobs_by_model on jobs (model, id);
