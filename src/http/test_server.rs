//! For tests: the server over a ledger with one event, on a port of its own.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use super::{AccessControl, CurrentRoutes, SnapshotCache, router, serve};
use crate::config::{Config, arguments};
use crate::ledger::store::{EventReader, Store, WriteBatch};

/// Returns the settings of a command line.
pub fn config_of(flags: &[&str]) -> Config {
    let command = arguments(clap::Command::new("memledger").no_binary_name(true));
    Config::load(&command.get_matches_from(flags)).unwrap()
}

/// A running server, which ends with this value.
pub struct TestServer {
    address: SocketAddr,
    agent: ureq::Agent,
    _runtime: tokio::runtime::Runtime,
}

impl TestServer {
    /// Starts it with the API enabled; `event` is the JSON of the ledger's event, which has the id 7.
    pub fn with_event(event: &str) -> Self {
        let config = config_of(&["--web.enable-api"]);
        let mut store = Store::in_memory().unwrap();
        let event = serde_json::from_str(event).unwrap();
        store.commit(&WriteBatch { events: [(7, event)].into(), ..WriteBatch::default() }).unwrap();
        let event_reader = Some(EventReader::Memory(Arc::new(Mutex::new(store))));
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let access_control = Arc::new(AccessControl::new(&config, Default::default()).unwrap());
        let snapshot_cache = Arc::new(SnapshotCache::default());
        let router = router(&config, snapshot_cache, event_reader, Default::default(), None, &access_control);
        runtime.spawn(serve(listener, CurrentRoutes::new(router), access_control, std::future::pending()));
        let agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        Self { address, agent, _runtime: runtime }
    }

    /// Returns status and body of a path below `/api/v1/`.
    pub fn get(&self, path: &str, accept: &str) -> (u16, String) {
        let request = self.agent.get(format!("http://{}/api/v1/{path}", self.address));
        let mut response = request.header("Accept", accept).call().unwrap();
        (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
    }
}
