-- API tokens with a name. Only a hash of each is stored.
create table api_tokens (
    id uuid primary key,
    name text not null,
    token_hash bytea not null unique,
    role text not null,
    limits json not null,
    created_at timestamptz not null default now(),
    -- Author, for users.
    created_by text not null,
    -- Null: valid until it is revoked.
    expires_at timestamptz,
    last_used_at timestamptz,
    revoked_at timestamptz
);
create unique index api_tokens_by_name on api_tokens (name) where revoked_at is null;

-- The token with which a task was submitted. The UUID of zeros is the token in the data folder of the server.
alter table tasks add column api_token uuid not null default '00000000-0000-0000-0000-000000000000';

-- The next task is looked for among the first ready tasks of each token.
create index tasks_ready_by_token on tasks (api_token, order_key, number) where state = 'ready' and waits_for is null;
create index tasks_ready_p0 on tasks (api_token) where state = 'ready' and waits_for is null and priority = 0;
drop index tasks_ready;
-- Among tokens with as many running tasks, the one that has waited longest for a slot is next.
alter table tasks add column granted_at timestamptz;
create index tasks_by_grant on tasks (api_token, granted_at desc) where granted_at is not null;
-- Counts of open tasks, also of a token, read this index only.
drop index tasks_open;
create index tasks_open on tasks (state, api_token)
    where state in ('queued', 'blocked', 'ready', 'running', 'waiting_on_human', 'paused', 'escalated');

-- The tokens with ready tasks, each with its number of running tasks, its limit, and the time of its last grant in µs since
-- 1970. An index is read once for each token.
create view token_shares as
with recursive token as (
    (select api_token from tasks where state = 'ready' and waits_for is null order by api_token limit 1)
    union all
    select (select t.api_token from tasks t
            where t.state = 'ready' and t.waits_for is null and t.api_token > token.api_token
            order by t.api_token limit 1)
    from token where token.api_token is not null
), running as (
    select api_token, count(*) as count from tasks where state = 'running' group by api_token
)
select token.api_token, coalesce(running.count, 0) as running, 
       case when json_typeof(t.limits -> 'running_tasks') = 'number' then (t.limits ->> 'running_tasks')::numeric::bigint end
           as running_limit,
       (select (extract(epoch from g.granted_at) * 1000000)::bigint from tasks g
        where g.api_token = token.api_token and g.granted_at is not null
        order by g.granted_at desc limit 1) as last_granted_us
from token
left join running on running.api_token = token.api_token
left join api_tokens t on t.id = token.api_token
where token.api_token is not null;
