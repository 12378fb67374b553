-- What users have set for the agents while cfq runs. Model null: the agent uses the model of the configuration. Each agent
-- has a row, so that grants can lock it.
create table agent_settings (
    agent        text primary key check (agent in ('alpha', 'beta')),
    model        text,
    -- Instructions for tasks that have none of their own.
    instructions text,
    changed_by   text not null default '',
    changed_at   timestamptz not null default now()
);
insert into agent_settings (agent) values ('alpha'), ('beta');

-- The agents whose model the task or schedule does not name, so that it follows changes. Older tasks keep their models.
alter table tasks add column agents_without_model text[] not null default '{}';
alter table schedules add column agents_without_model text[] not null default '{}';

-- Whether the settings of an agent changed since the task was granted. The next call of its runner releases the task, so
-- that it is granted again with the new ones.
alter table tasks add column agents_changed boolean not null default false;

-- Model of the next attempt of a placed or running job whose agent got another model.
alter table jobs add column next_model text;
