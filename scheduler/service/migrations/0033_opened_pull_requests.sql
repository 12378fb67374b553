-- Lists of the pull requests that were opened since a time.
create index internal_pr_moves_opened on internal_pr_moves (at) where n = 1;

-- Lists of the pull requests in one state. In the order of an expression, Postgres cannot read the primary key instead
-- and skip the pull requests in other states.
create index internal_prs_by_state_and_number on internal_prs (state, (-number));
drop index internal_prs_by_state;
