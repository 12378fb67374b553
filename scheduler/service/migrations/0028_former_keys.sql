-- Revoked NATS keys of machines that joined again. They are never accepted again.
alter table machines add column former_keys text[] not null default '{}';
