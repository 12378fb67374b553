-- False while the leader receives no message from NATS: another scheduler that does may take over at once.
alter table leader add column has_nats boolean not null default true;
