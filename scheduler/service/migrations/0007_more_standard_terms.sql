-- Columns get their standard terms. Types, constraints, indexes and stored values stay as they are.
-- Nodes that can never run the job, with the reason that each gave when it refused the job.
alter table jobs rename column rejected_by to refused_by;

-- Number of the current leader's term.
alter table leader rename column generation to term;
