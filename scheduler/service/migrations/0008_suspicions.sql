-- Losses are counted apart from the evidence that a job caused them.
-- Attempts that ended before a node accepted them, because the node was lost or did not accept them.
alter table jobs add column unaccepted integer not null default 0;

-- Attempts, lost or not accepted, whose end the job may have caused. Earlier losses keep their effect.
alter table jobs add column suspicions integer not null default 0;
update jobs set suspicions = losses where losses > 0 and state in ('queued', 'placed', 'running');

-- Why the job may have caused the end of this attempt; null if it is not suspected.
alter table attempts add column suspicion text check (suspicion in ('node_lost', 'stalled', 'not_accepted'));
create index attempts_by_boot on attempts (node_boot);

-- Identifies one start of the machine, so that a restart of the machine is told apart from a crash of the process.
alter table nodes add column machine_boot text;
alter table runners add column machine_boot text;

-- The request that the current lease answers, until the runner's first heartbeat that lists the lease.
alter table tasks add column lease_request uuid;
