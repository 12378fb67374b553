-- Labels of tasks. The lists of one label are read through the index on (label, number), without tasks that lack it.
create table task_labels (
    task   uuid not null references tasks on delete cascade,
    label  text not null,
    -- Number of the task: its position in lists.
    number bigint not null,
    primary key (task, label)
);
create index task_labels_by_label on task_labels (label, number);
