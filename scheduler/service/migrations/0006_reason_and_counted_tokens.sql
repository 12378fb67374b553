-- Columns get their standard terms. Types, constraints, indexes and stored values stay as they are.
-- Reason for the change of a pull request's state.
alter table internal_pr_moves rename column why to reason;

-- Tokens for prompt and output, counted by a node that refused the job.
alter table jobs rename column known_need to counted_tokens;
