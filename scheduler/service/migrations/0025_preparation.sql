-- Time of a node's last report that it is preparing the prompt of a placed job.
alter table jobs add column preparing_at timestamptz;
