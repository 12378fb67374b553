-- Whether the runner calls another model if the job fails.
alter table jobs add column has_fallback boolean not null default false;
