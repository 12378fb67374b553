-- Since when a node gets no new work because an operator said so; null if it gets work.
alter table nodes add column cordoned_at timestamptz;
