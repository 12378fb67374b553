-- The main branch that cfq's mirrors of a repository follow. Only the step that merges a task moves it, and only if
-- the merge was planned on the commit that is recorded here, so two runners cannot both merge onto the same commit.
create table repositories (
    -- Path of the repository, without symbolic links, as the runners see it.
    path   text primary key,
    -- Commit of the main branch.
    main   text not null,
    -- Number of merges so far.
    merges bigint not null
);

-- The repository into whose main branch the pull request was merged, and the number of the merge there, from 1.
alter table internal_prs add column repository text, add column merge_number bigint;
create unique index internal_prs_by_merge_number on internal_prs (repository, merge_number);
create index internal_prs_by_merge_commit on internal_prs (repository, merge_commit);
create index internal_prs_by_merged_base on internal_prs (repository, base);
