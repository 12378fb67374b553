-- One process per id. A new boot gets the id at once only if the process of the earlier boot has ended for certain;
-- otherwise it waits until the lease of the earlier boot has ended.
-- The lock on the credentials file that the process of the current boot holds. A later boot with the same lock proves
-- that this process has ended.
alter table nodes add column credentials_lock text;
alter table runners add column credentials_lock text;

-- The boot before the current one, and how it ended. Its work is released after the registration is committed, by the
-- registration, its repetition or the sweep.
alter table nodes add column earlier_boot uuid;
alter table nodes add column earlier_boot_end text
    check (earlier_boot_end in ('drained', 'machine_restarted', 'unexpected'));
alter table runners add column earlier_boot uuid;
alter table runners add column earlier_boot_end text
    check (earlier_boot_end in ('drained', 'machine_restarted', 'unexpected'));

-- When a boot from another start of the machine last asked for the id while the lease of the current boot had not ended:
-- if that lease then ends, the machine was restarted.
alter table nodes add column restart_seen_at timestamptz;
alter table runners add column restart_seen_at timestamptz;

-- Grants of the task that no runner received, since a runner last confirmed one.
alter table tasks add column unreceived integer not null default 0;
