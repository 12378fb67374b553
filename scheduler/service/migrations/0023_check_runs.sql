-- Whether cfq has checked an iteration, and the checks of the project that ran. Iterations of earlier builds count as
-- checked.
alter table iterations add column checked boolean not null default true;
alter table iterations add column ran json not null default '[]';
