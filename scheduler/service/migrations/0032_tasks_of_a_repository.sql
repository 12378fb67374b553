-- Lists of the tasks of one repository. An index row cannot hold the longest paths, so it holds their hash.
create index tasks_by_repo on tasks (md5(spec ->> 'repo'), (-number)) where state <> 'call';

-- Lists of the pull requests in one state.
create index internal_prs_by_state on internal_prs (state, number);
