//! Examples at the end of the help texts.

pub const SUBMIT: &str = "\
Examples:
  cfq submit \"Write slug(text) in slug.py\" --language python --watch
  cfq submit --edit                       write the description in an editor
  cfq submit -f task.yaml --dry-run       check it, and show the first prompt
  cfq submit \"Fix the parser\" --context 'src/parse/*.rs' --alpha ollama:box/qwen2.5-coder:14b
  git diff | cfq submit -                 the description is on standard input
  cfq submit \"Update the docs\" --after t42 --at \"in 2h\"";

pub const LS: &str = "\
Examples:
  cfq ls --state escalated,waiting_on_human     what needs you
  cfq ls --repo . --since 1d                    of this repository, of the last day
  cfq ls --label nightly --sort oldest -w       print it again every two seconds
  cfq ls -q --state merged | xargs -r -n 1 cfq diff
  cfq --json ls | jq '.tasks[].title'";

pub const SHOW: &str = "\
Examples:
  cfq show t42
  cfq show t42 t43 --verbose";

pub const JOBS: &str = "\
Examples:
  cfq jobs --state queued            what waits, and why
  cfq jobs --task t42
  cfq jobs --node gpu1 -w";

pub const EXPLAIN: &str = "\
Examples:
  cfq explain t42                    why the task waits, or where it runs";

pub const WATCH: &str = "\
Examples:
  cfq watch                          the newest task
  cfq watch t42 --no-tokens
  cfq watch t42 t43                  several at once
  cfq --json watch t42 | jq -c .body.type";

pub const WAIT: &str = "\
Examples:
  cfq wait t42 t43 --timeout 2h && echo done
  cfq wait --label nightly --fail-fast";

pub const LOGS: &str = "\
Examples:
  cfq logs t42 --since 10m
  cfq logs -f t42                    until it ends or needs you
  cfq logs --process node -n 50 -f";

pub const DIFF: &str = "\
Examples:
  cfq diff t42                       with colours and a pager, on a terminal
  cfq diff t42 --stat
  cfq diff t42 src/add.py            only this file
  cfq diff t42 --from 1              what changed since iteration 1
  cfq diff t42 | git apply";

pub const PULL: &str = "\
Examples:
  cfq pull t42
  cfq pull t42 --repo ~/clone --iteration 2";

pub const RESOLVE: &str = "\
Examples:
  cfq resolve t42                    print the question, and ask for the answer
  cfq resolve t42 --action retry_with_constraints --constraint \"keep the old interface\"
  cfq resolve t42 --action switch_llm --agent beta --model openai:box/qwen
  cfq resolve t42 --action accept_best_effort --watch";

pub const CANCEL: &str = "\
Examples:
  cfq cancel t42 t43 --reason \"not needed\"
  cfq cancel --label nightly --dry-run";

pub const RETRY: &str = "\
Examples:
  cfq retry t42
  cfq retry --state failed --dry-run";

pub const PRIORITIZE: &str = "\
Examples:
  cfq prioritize P0 t42";

pub const SCHEDULE: &str = "\
Examples:
  cfq schedule run nightly           submit its task now
  cfq schedule add nightly --cron \"30 2 * * 1-5\" --zone Europe/Berlin \"Fix the warnings\" --repo ~/project";

pub const MODELS: &str = "\
Examples:
  cfq models suggest
  cfq models ls --sort size
  cfq models pull hf:Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:qwen2.5-coder-7b-instruct-q4_k_m.gguf
  cfq models fit path:/models/m.gguf";

pub const JOIN: &str = "\
Examples:
  cfq join https://192.168.1.5:7710 TOKEN -d
  cfq join                           with the server that this machine joined before";

pub const COMPLETIONS: &str = "\
Examples:
  echo 'source <(cfq completions bash)' >> ~/.bashrc
  echo 'source <(cfq completions zsh)' >> ~/.zshrc
  cfq completions fish > ~/.config/fish/completions/cfq.fish";

pub const SCHEMA: &str = "\
Examples:
  cfq schema                         list the names
  cfq schema ls";

pub const NODES: &str = "\
Examples:
  cfq nodes --state unreachable,cordoned
  cfq nodes gpu1 -w";

pub const PR: &str = "\
Examples:
  cfq pr ls --repo . --since 1d
  cfq pr show 7";

pub const AGENTS: &str = "\
Examples:
  cfq agents set beta ollama:box/qwen3:14b
  cfq agents instruct alpha \"Write type annotations.\"";

pub const DEAD: &str = "\
Examples:
  cfq dead show t42
  cfq dead requeue t42";

pub const MACHINES: &str = "\
Examples:
  cfq machines drain gpu1 --timeout 10m && cfq machines revoke gpu1";

pub const BACKUP: &str = "\
Examples:
  cfq backup ~/backups/cfq-monday.tar.zst
  cfq --data ~/cfq backup cfq.tar.zst";

pub const RESTORE: &str = "\
Examples:
  cfq restore --check cfq.tar.zst
  cfq restore cfq.tar.zst
  cfq --data ~/cfq restore cfq.tar.zst";

pub const TOKEN: &str = "\
Examples:
  cfq token create --name gpu1 --ttl 2h
  cfq token create --role metrics --name prometheus
  cfq token create --role submit --name editor --running-tasks 2 --repo ~/shop
  cfq token rm editor";

pub const REVIEW: &str = "\
Examples:
  cfq review                         the last commit
  cfq review main..HEAD --depth comprehensive
  cfq review t42 --iteration 1";

pub const CHECKS: &str = "\
Examples:
  cfq checks init --print
  cfq checks run tests --commit main";

pub const CFQ: &str = "\
Environment variables:
  CFQ_URL, CFQ_TOKEN    URL and API token of a remote server; `cfq token path` on that server prints
                        the file with the token
  CFQ_CA_FILE           certificate authority (PEM) of that server
  CFQ_DATA, CFQ_CACHE, CFQ_CONFIG    data, cache and configuration folder
  CFQ_CONFIG_FILE       configuration file
  CFQ_BIND              address of `cfq up`
  CFQ_SERVICES, CFQ_POSTGRES_BIN, CFQ_NATS_BIN    programs of `cfq up`
  CFQ_ACCOUNT           account of the services of `cfq up` as root
  HF_TOKEN, HF_ENDPOINT, HF_HOME    access to the Hugging Face hub
  CFQ_LOG               log filter of the processes, such as debug
  CFQ_PAGER, PAGER      pager of `cfq diff`
  NO_COLOR, CLICOLOR, CLICOLOR_FORCE    whether to use colours

Exit codes: 0 done, 2 usage error, 3 needs a human, 4 failed, 5 server unreachable, 6 timed out, 130 interrupted";
