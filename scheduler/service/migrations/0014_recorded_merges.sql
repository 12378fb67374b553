-- Merges of deleted tasks. Runners rebuild the main branch of a repository from them, as from those of kept tasks.
create table recorded_merges (
    repository   text not null,
    -- Number of the merge in the repository's main branch, from 1.
    number       bigint not null,
    merge_commit text not null,
    -- Base commit of the task.
    base         text not null,
    -- What a runner needs to create the merge's commits again; null if the task's steps do not contain it.
    record       json,
    primary key (repository, number)
);
create index recorded_merges_by_commit on recorded_merges (repository, merge_commit);
create index recorded_merges_by_base on recorded_merges (repository, base);
