-- The waiting task of P0 that gets the slot of this running task after the next step. It has no foreign key: a name that
-- is no longer needed is withdrawn by the leader or ends with the lease.
alter table tasks add column preempted_by uuid;

-- Whether the task was released with this step, so that a repeated request gets the same reply.
alter table steps add column released boolean not null default false;

-- Number of tasks that the runner drives at the same time; null if its version does not report it.
alter table runners add column slots integer;
