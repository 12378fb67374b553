//! Tests of machines that join, and of their tokens.

use cfq_proto::ids::NodeId;
use uuid::Uuid;

use super::super::{Hint, JoinRefusal, JoiningMachine, LeaderHint};
use super::*;

const SECRET: [u8; 32] = [7; 32];

fn name(text: &str) -> NodeId {
    NodeId::new(text).unwrap()
}

struct Token<'a> {
    env: &'a TestEnv,
    id: Uuid,
}

impl<'a> Token<'a> {
    async fn new(env: &'a TestEnv, bound: Option<&str>) -> Self {
        let id = Uuid::now_v7();
        env.store.add_join_token(id, SECRET, bound.map(name).as_ref(), 600).await.unwrap().unwrap();
        Self { env, id }
    }

    async fn join(&self, wanted: Option<&str>, key: &str) -> Result<NodeId, JoinRefusal> {
        self.join_with(SECRET, wanted, key).await
    }

    async fn join_with(&self, secret_hash: [u8; 32], wanted: Option<&str>, key: &str) -> Result<NodeId, JoinRefusal> {
        let wanted = wanted.map(name);
        let machine = JoiningMachine {
            token_id: self.id,
            secret_hash,
            name: wanted.as_ref(),
            fallback_name: None,
            nats_key: key,
            version: "0.1.0",
        };
        self.env.store.join_machine(machine).await.unwrap()
    }
}

#[tokio::test]
async fn token_works_once_and_a_repetition_gets_the_same_name() {
    let env = TestEnv::new().await;
    let token = Token::new(&env, None).await;
    assert_eq!(token.join_with([8; 32], Some("gpu1"), "U1").await, Err(JoinRefusal::UnknownToken));
    assert_eq!(token.join(None, "U1").await, Err(JoinRefusal::NoName));
    assert_eq!(token.join(Some("gpu1"), "U1").await, Ok(name("gpu1")));
    assert_eq!(token.join(Some("gpu1"), "U1").await, Ok(name("gpu1")), "the first reply may have been lost");
    assert_eq!(token.join(Some("gpu2"), "U2").await, Err(JoinRefusal::Used));
    let unknown = Token { env: &env, id: Uuid::now_v7() };
    assert_eq!(unknown.join(Some("gpu2"), "U2").await, Err(JoinRefusal::UnknownToken));
    let machines = env.store.machines().await.unwrap();
    assert_eq!(machines.len(), 1);
    assert_eq!((machines[0].nats_key.as_str(), machines[0].alive, machines[0].last_seen), ("U1", false, None));
}

/// Two machines use the same token at the same time.
#[tokio::test]
async fn concurrent_uses_of_a_token_let_one_machine_join() {
    let env = TestEnv::new().await;
    let token = Token::new(&env, None).await;
    let (one, two) = tokio::join!(token.join(Some("gpu1"), "U1"), token.join(Some("gpu2"), "U2"));
    assert_eq!([one.is_ok(), two.is_ok()].iter().filter(|ok| **ok).count(), 1, "{one:?} {two:?}");
    assert_eq!(env.store.count("select count(*) from machines").await, 1);
}

#[tokio::test]
async fn expired_token_and_other_name_are_refused() {
    let env = TestEnv::new().await;
    let token = Token::new(&env, Some("gpu1")).await;
    assert_eq!(token.join(Some("gpu2"), "U1").await, Err(JoinRefusal::OtherName(name("gpu1"))));
    env.store.raw("update join_tokens set expires_at = now()").await;
    assert_eq!(token.join(Some("gpu1"), "U1").await, Err(JoinRefusal::Expired));
    env.store.raw("update join_tokens set expires_at = now() + interval '1 minute'").await;
    assert_eq!(token.join(None, "U1").await, Ok(name("gpu1")), "the token names the machine");
    env.store.raw("update join_tokens set expires_at = now() - interval '2 days'").await;
    Token::new(&env, None).await;
    assert_eq!(env.store.count("select count(*) from join_tokens").await, 1, "old tokens are deleted");
}

#[tokio::test]
async fn name_and_key_belong_to_one_machine_until_it_is_revoked() {
    let env = TestEnv::new().await;
    running_node(&env).await;
    let token = Token::new(&env, None).await;
    let own = node();
    assert_eq!(token.join(Some(own.as_str()), "U1").await, Err(JoinRefusal::NameOfServer(own)));
    token.join(Some("gpu1"), "U1").await.unwrap();
    let second = Token::new(&env, None).await;
    assert_eq!(second.join(Some("gpu1"), "U2").await, Err(JoinRefusal::NameTaken(name("gpu1"))));
    assert_eq!(second.join(Some("gpu2"), "U1").await, Err(JoinRefusal::JoinedAs(name("gpu1"))));
    let again = Token::new(&env, None).await;
    assert_eq!(again.join(None, "U1").await, Ok(name("gpu1")), "the machine keeps its name");
    assert_eq!(again.join(Some("gpu3"), "U3").await, Err(JoinRefusal::Used));
    assert_eq!(env.store.revoke_machine(&name("gpu9")).await.unwrap(), None);
    assert!(env.store.revoke_machine(&name("gpu1")).await.unwrap().is_some());
    let revoked_at = env.store.machines().await.unwrap()[0].revoked_at.unwrap();
    assert!(env.store.revoke_machine(&name("gpu1")).await.unwrap().is_some(), "again");
    assert_eq!(env.store.machines().await.unwrap()[0].revoked_at, Some(revoked_at));
    assert_eq!(token.join(Some("gpu1"), "U1").await, Err(JoinRefusal::Used), "its token does not bring it back");
    assert_eq!(second.join(Some("gpu1"), "U1").await, Err(JoinRefusal::KeyRevoked));
    assert_eq!(second.join(Some("gpu1"), "U2").await, Ok(name("gpu1")), "a new key under the old name");
    let machines = env.store.machines().await.unwrap();
    assert_eq!((machines.len(), machines[0].nats_key.as_str(), machines[0].revoked_at), (1, "U2", None));
}

#[tokio::test]
async fn number_of_open_tokens_is_limited() {
    let env = TestEnv::new().await;
    env.store
        .raw(
            "insert into join_tokens (id, secret_hash, expires_at)
             select gen_random_uuid(), '\\x00', now() + interval '1 hour' from generate_series(1, 200)",
        )
        .await;
    let add = async || env.store.add_join_token(Uuid::now_v7(), SECRET, None, 600).await.unwrap();
    assert_eq!(add().await, None);
    env.store.raw("update join_tokens set expires_at = now() where id in (select id from join_tokens limit 1)").await;
    let expires = add().await.unwrap();
    let now = env.store.clock_ms().await.unwrap() / 1000;
    assert!((now + 590..=now + 610).contains(&expires), "{expires} {now}");
}

async fn running_node(env: &TestEnv) {
    env.store.register_node(&crate::testing::node_registration(BootId::fresh())).await.unwrap().unwrap();
}

#[tokio::test]
async fn cordon_lasts_over_a_restart_of_the_node_until_it_is_ended() {
    let env = TestEnv::new().await;
    assert_eq!(env.store.set_cordon(&node(), true).await.unwrap(), None, "no such node");
    running_node(&env).await;
    let is_cordoned = async || {
        let (core, view) = (env.store.core_nodes().await.unwrap(), env.store.node_views().await.unwrap());
        assert_eq!(core[0].cordoned, view[0].cordoned);
        view[0].cordoned
    };
    assert!(!is_cordoned().await);
    let hint = env.store.set_cordon(&node(), true).await.unwrap().unwrap();
    assert_eq!(hint, [Hint::Leader(LeaderHint::Node(node()))]);
    assert!(is_cordoned().await);
    running_node(&env).await;
    assert!(is_cordoned().await);
    env.store.set_cordon(&node(), false).await.unwrap().unwrap();
    assert!(!is_cordoned().await);
}

/// NATS may still accept the machine's key for a moment, and a machine that joins again gets work.
#[tokio::test]
async fn revoked_machine_gets_no_work_until_it_joins_again() {
    let env = TestEnv::new().await;
    Token::new(&env, None).await.join(Some(node().as_str()), "U1").await.unwrap();
    running_node(&env).await;
    env.store.revoke_machine(&node()).await.unwrap().unwrap();
    assert!(env.store.core_nodes().await.unwrap()[0].cordoned);
    Token::new(&env, None).await.join(Some(node().as_str()), "U2").await.unwrap();
    assert!(!env.store.core_nodes().await.unwrap()[0].cordoned);
}

#[tokio::test]
async fn withdrawn_token_cannot_be_used() {
    let env = TestEnv::new().await;
    let (used, first, second) =
        (Token::new(&env, None).await, Token::new(&env, Some("gpu2")).await, Token::new(&env, None).await);
    used.join(Some("gpu1"), "U1").await.unwrap();
    let open = env.store.join_tokens().await.unwrap();
    assert_eq!(open.iter().map(|token| token.id).collect::<Vec<_>>(), [first.id, second.id]);
    assert_eq!(env.store.remove_join_tokens(Some(&[first.id, used.id, Uuid::now_v7()])).await.unwrap(), 1);
    assert_eq!(first.join(None, "U2").await, Err(JoinRefusal::UnknownToken));
    assert_eq!(env.store.remove_join_tokens(None).await.unwrap(), 1);
    assert_eq!(second.join(Some("gpu3"), "U3").await, Err(JoinRefusal::UnknownToken));
    assert_eq!(used.join(Some("gpu1"), "U1").await, Ok(name("gpu1")), "a used token is not touched");
}

/// Also if the node registers for the first time after its machine was revoked.
#[tokio::test]
async fn revoked_key_and_node_stay_refused() {
    let env = TestEnv::new().await;
    Token::new(&env, None).await.join(Some(node().as_str()), "U1").await.unwrap();
    env.store.revoke_machine(&node()).await.unwrap().unwrap();
    running_node(&env).await;
    assert!(env.store.core_nodes().await.unwrap()[0].cordoned);
    env.store.set_cordon(&node(), false).await.unwrap().unwrap();
    assert!(env.store.core_nodes().await.unwrap()[0].cordoned, "a cordon of a revoked machine does not end");
    Token::new(&env, None).await.join(Some(node().as_str()), "U2").await.unwrap();
    let other = Token::new(&env, None).await;
    assert_eq!(other.join(Some("gpu7"), "U1").await, Err(JoinRefusal::KeyRevoked), "also under another name");
}
