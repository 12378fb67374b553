-- The checks of the project that ran on the merge of a pull request.
alter table internal_prs add column merge_checks json not null default '[]';
