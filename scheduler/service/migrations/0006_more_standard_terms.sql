-- Columns get their standard terms. Types, constraints, indexes and stored values stay as they are.
-- Reason for the change of a pull request's state.
alter table internal_pr_moves rename column why to reason;

-- Tokens for prompt and output, counted by a node that refused the job.
alter table jobs rename column known_need to counted_tokens;

-- Nodes that can never run the job, with the reason that each gave when it refused the job.
alter table jobs rename column rejected_by to refused_by;

-- Number of the current leader's term.
alter table leader rename column generation to term;
