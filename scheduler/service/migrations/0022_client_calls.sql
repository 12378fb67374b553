-- Model calls of clients of the OpenAI-compatible API. Such a call is a task of the state 'call' with one job, so that
-- jobs have one kind of owner. No list of tasks reads this state. The row is deleted when the call has ended: nothing of
-- the call is kept.
alter table tasks drop constraint tasks_state_check;
alter table tasks add constraint tasks_state_check
    check (state in ('call', 'queued', 'blocked', 'ready', 'running', 'waiting_on_human', 'paused', 'escalated', 'merged',
                     'accepted', 'failed', 'cancelled'));

-- Time at which the call expires unless the scheduler to which its client is connected extends it. The leader deletes
-- expired calls.
alter table tasks add column call_expires timestamptz;
alter table tasks add constraint tasks_call_expires_check check ((state = 'call') = (call_expires is not null));

-- Calls have negative numbers of their own, so that they leave no gaps in the numbers of tasks.
create sequence call_numbers;
alter table tasks add constraint tasks_call_number_check check ((state = 'call') = (number < 0));

alter table jobs drop constraint jobs_role_check;
alter table jobs add constraint jobs_role_check check (role in ('alpha', 'beta', 'client'));
