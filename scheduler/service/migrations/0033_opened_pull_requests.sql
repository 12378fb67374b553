-- Lists of the pull requests that were opened since a time.
create index internal_pr_moves_opened on internal_pr_moves (at) where n = 1;

-- Lists of the pull requests in one state. In the order of an expression, Postgres cannot read the primary key instead
-- and skip the pull requests in other states.
create index internal_prs_by_state_and_number on internal_prs (state, (-number));
drop index internal_prs_by_state;

-- Lists of the pull requests of one repository. An index row cannot hold the longest paths, so it holds their hash.
alter table internal_prs add column repo_hash text;
update internal_prs set repo_hash = md5(tasks.spec ->> 'repo') from tasks where tasks.id = internal_prs.task;
create index internal_prs_by_repo on internal_prs (repo_hash, state, (-number));
