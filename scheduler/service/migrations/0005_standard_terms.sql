-- Columns get their standard terms. Types, constraints, indexes and stored values stay as they are.
-- Models that a node refused for now: {model: {version, at_ms}}.
alter table nodes rename column left_out to exclusions;

-- Failed attempts and the backoff after them, by node: {node: {failures, until_ms}}.
alter table jobs rename column setbacks to node_failures;

-- Nodes that cannot run the job, with the reason of each: {node: reason}.
alter table jobs rename column never to rejected_by;

-- The task's runner sends heartbeats, but completed no step for too long.
alter table tasks rename column stuck to stalled;
