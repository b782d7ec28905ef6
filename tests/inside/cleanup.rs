//! Cleanups of real containers, by the verb, the route and `--reporter.auto-cleanup`. The allocator is the stand-in's.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use fake_nvml::{Process, State};
use serde_json::Value;

use super::{Host, MIB};
use crate::support::docker::{Engine, of, unique};
use crate::support::{Memledger, eventually, run};

const RESERVED: &str = "memledger_container_torch_reserved_bytes";

/// A program with a process for each of these texts, which are its ranks. Each has 200 MiB of tensors and 300 MiB of cache.
fn ranks(texts: &[&str]) -> String {
    let begin = "
import os, threading, time, torch, memledger_client
from memledger_client._cleanup import cleaner
torch.cuda.memory.STANDIN_IS_SPLIT = False
torch.cuda.init()
torch.cuda.standin_allocate(500 << 20)
torch.cuda.standin_free(300 << 20)
memledger_client.start()
";
    let texts: Vec<String> = texts.iter().map(|text| format!("{begin}{text}")).collect();
    format!(
        r#"
import os, subprocess, sys
for rank, text in enumerate({texts:?}):
    subprocess.Popen([sys.executable, "-c", text], env=dict(os.environ, LOCAL_RANK=str(rank)))
print("ready", flush=True)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"#
    )
}

const STEPS: &str = "
while True:
    memledger_client.step()
    time.sleep(0.02)
";

/// Returns the result of the verb, with its exit status.
fn cleanup(host: &Host, words: &[&str]) -> (Option<i32>, String, String) {
    let socket = format!("--local.socket={}", host.folder.path().join("control.sock").display());
    run(&[&["cleanup", &socket], words].concat())
}

fn start(engine: &Engine, name: &str, more: &[&str]) -> Host {
    Host::start_with(engine, name, |folder| {
        let socket = format!("--local.socket={}", folder.join("control.sock").display());
        more.iter().map(|flag| (*flag).to_owned()).chain([socket]).collect()
    })
}

/// Waits until this number of ranks report their memory.
fn wait_for_ranks(memledger: &Memledger, name: &str, ranks: usize) {
    memledger.eventually("all ranks", |metrics| match metrics.all(RESERVED, &of(name)).len() {
        found if found == ranks => Ok(()),
        found => Err(format!("{found}")),
    });
}

#[test]
fn verb_cleans_all_ranks_and_many_requests_are_one_cleanup() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("cleanup");
    let host = start(&engine, &name, &[]);
    let _container = host.run(&engine, &name, &ranks(&[STEPS, STEPS]));
    wait_for_ranks(&host.memledger, &name, 2);
    // as many as there are cores and more, each of which waits
    let results: Vec<_> = std::thread::scope(|scope| {
        let requests: Vec<_> = (0..8).map(|_| scope.spawn(|| cleanup(&host, &[&name]))).collect();
        requests.into_iter().map(|requests| requests.join().expect("a result")).collect()
    });
    let (done, refused): (Vec<_>, Vec<_>) = results.into_iter().partition(|(code, ..)| *code == Some(0));
    // on a very slow machine one may come so late that it is a cleanup of its own
    let (first, later): (Vec<_>, Vec<_>) =
        done.into_iter().partition(|(_, text, _)| !text.contains(": 0 B given back"));
    assert!(!first.is_empty(), "{later:?} {refused:?}");
    for (_, text, _) in first {
        assert!(text.starts_with(&format!("{name}: 600.0 MiB given back\nrank 0, pid ")), "{text}");
        assert!(
            text.contains("\nrank 1, pid ") && text.contains(": 500.0 MiB before, 200.0 MiB after"),
            "{text}"
        );
    }
    for (_, _, errors) in refused {
        assert!(errors.contains("its last cleanup ended"), "{errors}");
    }
    eventually("the cleanups in the log", || match host.memledger.log().matches("cleanup ended").count() {
        0 => Err("none".to_owned()),
        ended if ended <= 1 + later.len() => Ok(()),
        ended => Err(format!("{ended}")),
    });
    host.memledger.eventually("less reserved memory", |metrics| {
        let reserved: f64 = metrics.all(RESERVED, &of(&name)).iter().map(|row| row.2).sum();
        if reserved == (400 * MIB) as f64 { Ok(()) } else { Err(format!("{reserved}")) }
    });
}

/// More requests a second than any script sends: a training must not stop for each of them.
#[test]
fn hundred_requests_at_once_are_few_cleanups() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("hundred");
    let host = start(&engine, &name, &[]);
    let _container = host.run(&engine, &name, &ranks(&[STEPS, STEPS]));
    wait_for_ranks(&host.memledger, &name, 2);
    let began = memledger::clock::Timestamp::now();
    let socket = host.folder.path().join("control.sock");
    let request = format!(
        "POST /api/v1/containers/{name}/cleanup HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    );
    let sent: Vec<_> = (0..100)
        .map(|_| {
            let mut stream = UnixStream::connect(&socket).expect("a connection");
            stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a time-out");
            let _ = stream.write_all(request.as_bytes()); // one connection too many is closed
            stream
        })
        .collect();
    let mut responses = std::collections::BTreeMap::new();
    for mut stream in sent {
        let mut response = String::new();
        let _ = stream.read_to_string(&mut response);
        let status = response.split(' ').nth(1).unwrap_or("closed").to_owned();
        assert!(["200", "429", "503", "closed"].contains(&&*status), "{response}");
        *responses.entry(status).or_insert(0) += 1;
    }
    assert!(responses.contains_key("200"), "{responses:?}");
    let seconds = memledger::clock::Timestamp::now().since(began).as_secs_f64();
    // a response is sent before its line is written
    let cleanups =
        eventually("a cleanup in the log", || match host.memledger.log().matches("cleanup ended").count() {
            0 => Err("none".to_owned()),
            cleanups => Ok(cleanups),
        });
    // five seconds apart, where answering takes as long
    assert!(
        (1.0..=2.0 + seconds / 5.0).contains(&(cleanups as f64)),
        "{cleanups} in {seconds} s: {responses:?}"
    );
    // the training goes on, and is cleaned again later
    eventually("a later cleanup", || match cleanup(&host, &[&name]) {
        (Some(0), ..) => Ok(()),
        (_, _, error) => Err(error),
    });
}

#[test]
fn ranks_that_do_not_respond_are_named() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("partial");
    let host = start(&engine, &name, &[]);
    let ends = "
while cleaner._request is None:
    time.sleep(0.01)
os._exit(0)
";
    let _container = host.run(&engine, &name, &ranks(&[STEPS, "threading.Event().wait()", ends]));
    wait_for_ranks(&host.memledger, &name, 3);
    let (code, text, errors) = cleanup(&host, &[&name, "--deadline=6s", "--json"]);
    assert_eq!(code, Some(1), "{text}{errors}");
    let response: Value = serde_json::from_str(&text).expect("JSON");
    let outcomes: Vec<_> = response["processes"].as_array().expect("a list").iter().collect();
    let outcomes: Vec<_> = outcomes.iter().map(|each| each["outcome"].as_str().expect("text")).collect();
    assert_eq!(outcomes, ["cleaned", "no_answer", "ended"], "{text}");
    assert_eq!(
        (&response["freed_bytes"], &response["container"]),
        (&(300 * MIB).into(), &name.as_str().into())
    );
}

#[test]
fn containers_that_cannot_be_cleaned_are_an_error_with_the_reason() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("silent");
    let host = start(&engine, &name, &[]);
    let _container = engine.run_python(&name, &[], "import signal\nprint('ready')\nsignal.pause()");
    host.memledger.eventually("the container", |metrics| {
        metrics.try_value("memledger_container_info", &of(&name)).map(drop)
    });
    for (wanted, expected) in [
        (name.as_str(), "none of its processes reports to memledger; see docs/inside-view.md".to_owned()),
        ("nobody", format!("no container \"nobody\" is running; the nearest known names are \"{name}\"")),
    ] {
        let (code, text, errors) = cleanup(&host, &[wanted]);
        assert!(code == Some(3) && text.is_empty() && errors.contains(&expected), "{code:?} {text} {errors}");
    }
    assert_eq!(cleanup(&host, &[&name, "--deadline=1h"]).0, Some(2));
}

#[test]
fn full_gpu_that_is_shared_is_cleaned_without_a_request() {
    let Some(engine) = Engine::shared() else { return };
    let name = unique("auto");
    let host = start(&engine, &name, &["--reporter.auto-cleanup=85%"]);
    let container = host.run(&engine, &name, &ranks(&[STEPS]));
    // 300 MiB are more than 5 % of this GPU, and the driver has 600 MiB for itself
    let mut state = State::with_gpus(1);
    state.gpus[0].memory.total = 5_000 * MIB;
    state.gpus[0].memory.used = 3_000 * MIB;
    let rank = eventually("the rank", || match container.pids().as_slice() {
        [_, rank] => Ok(*rank),
        pids => Err(format!("{pids:?}")),
    });
    state.gpus[0].processes =
        vec![Process::compute(rank, Some(600 * MIB)), Process::compute(std::process::id(), Some(100 * MIB))];
    host.fake.set(&state).expect("the state is written");
    wait_for_ranks(&host.memledger, &name, 1);
    for _ in 0..3 {
        let metrics = host.memledger.fresh_metrics();
        assert_eq!(
            metrics.value(RESERVED, &of(&name)),
            (500 * MIB) as f64,
            "not full: {}",
            host.memledger.log()
        );
    }
    state.gpus[0].memory.used = 4_390 * MIB;
    host.fake.set(&state).expect("the state is written");
    eventually("a cleanup", || {
        let log = host.memledger.log();
        let line = log.lines().find(|line| line.contains("cleanup ended")).ok_or_else(|| log.clone())?;
        let freed = format!("freed_bytes={}", 300 * MIB);
        if line.contains("trigger=auto") && line.contains(&freed) { Ok(()) } else { Err(line.to_owned()) }
    });
}
