-- One model that is full says nothing about another on the same node: {model: {version, at_ms}}.
alter table nodes drop column left_out_version;
alter table nodes drop column left_out_at;
alter table nodes add column left_out json not null default '{}';

-- A job that waits for a place: its ready task is granted to nobody until it has one.
alter table tasks add column waits_for uuid references jobs;

-- Its runner beats, and says that it got no step done for too long.
alter table tasks add column stuck boolean not null default false;
