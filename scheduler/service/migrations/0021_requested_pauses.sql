-- Requests to pause that have not taken effect yet are found without reading all open tasks.
create index tasks_with_requested_pause on tasks (number) where pause_requested is not null;
