//! The node of Kubernetes that `make test-kube` starts for all tests (`tests/kube/node.sh`), with memledger from its chart.

use std::cell::RefCell;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::docker::unique;
use super::{Metrics, eventually, skip};

/// The node, shared by all tests of a run.
pub struct Node {
    folder: PathBuf,
    /// The address of memledger's pod, until it is another one.
    address: RefCell<String>,
}

/// A container of a pod, as metrics and commands name it.
#[derive(Clone, Copy, Debug)]
pub struct PodContainer<'a> {
    pub namespace: &'a str,
    pub pod: &'a str,
    pub name: &'a str,
}

impl<'a> PodContainer<'a> {
    pub fn labels(&self) -> [(&'static str, &'a str); 3] {
        [("k8s_namespace_name", self.namespace), ("k8s_pod_name", self.pod), ("container_name", self.name)]
    }

    /// Returns its name for `memledger why`.
    pub fn path(&self) -> String {
        format!("{}/{}/{}", self.namespace, self.pod, self.name)
    }
}

/// What a command returned.
#[derive(Debug)]
pub struct CommandResult {
    pub succeeded: bool,
    pub output: String,
    pub errors: String,
}

impl CommandResult {
    /// Returns standard output and standard error as one line of words: the lines are wrapped.
    pub fn words(&self) -> String {
        format!("{} {}", self.output, self.errors).split_whitespace().collect::<Vec<_>>().join(" ")
    }

    pub fn text(self) -> Result<String, String> {
        if self.succeeded { Ok(self.output) } else { Err(format!("{}{}", self.output, self.errors)) }
    }
}

impl Node {
    /// Returns the node of this run; `None`, with the reason printed, where there is none.
    pub fn shared() -> Option<Self> {
        let folder = std::env::var_os("MEMLEDGER_TEST_KUBE_NODE").filter(|folder| !folder.is_empty());
        if folder.is_none() {
            skip("MEMLEDGER_TEST_KUBE_NODE is not set; `make test-kube` starts a node and sets it");
        }
        Some(Self { folder: folder?.into(), address: RefCell::default() })
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn script(&self, action: &str, words: &[&str]) -> Command {
        let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kube/node.sh"));
        command.arg(action).arg(&self.folder).args(words);
        command
    }

    /// Returns a command that is executed in the node's namespaces.
    pub fn command(&self, words: &[&str]) -> Command {
        self.script("run", words)
    }

    /// Runs a command in the node's namespaces to its end, with this standard input.
    pub fn run_with_input(&self, words: &[&str], input: &str) -> CommandResult {
        let mut command = self.command(words);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("node.sh starts");
        // it may end without reading
        let _ = child.stdin.take().expect("piped").write_all(input.as_bytes());
        let output = child.wait_with_output().expect("node.sh ends");
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        CommandResult {
            succeeded: output.status.success(),
            output: text(output.stdout),
            errors: text(output.stderr),
        }
    }

    pub fn run(&self, words: &[&str]) -> CommandResult {
        self.run_with_input(words, "")
    }

    /// Runs kubectl; its error if it fails.
    pub fn try_kubectl(&self, words: &[&str]) -> Result<String, String> {
        self.run(&[&["kubectl"], words].concat()).text()
    }

    /// Runs kubectl, which has to succeed.
    pub fn kubectl(&self, words: &[&str]) -> String {
        self.try_kubectl(words).unwrap_or_else(|error| panic!("kubectl {words:?}: {error}"))
    }

    /// Returns what kubectl prints for this object as JSON.
    pub fn get(&self, words: &[&str]) -> Result<serde_json::Value, String> {
        let text = self.try_kubectl(&[&["get", "-o", "json"], words].concat())?;
        serde_json::from_str(&text).map_err(|error| format!("{error}: {text}"))
    }

    /// Runs a command of memledger in its pod.
    pub fn memledger(&self, words: &[&str]) -> CommandResult {
        let exec = ["kubectl", "-n", "memledger", "exec", "daemonset/memledger", "--", "/memledger"];
        self.run(&[&exec, words].concat())
    }

    /// Returns the words of `memledger why NAME`.
    pub fn why(&self, name: &str) -> String {
        self.memledger(&["why", name]).words()
    }

    /// Returns the address of memledger's pod.
    pub fn memledger_address(&self) -> Result<String, String> {
        let pods = self.get(&["-n", "memledger", "pods", "-l", "app.kubernetes.io/name=memledger"])?;
        let is_kept = |pod: &&serde_json::Value| pod["metadata"]["deletionTimestamp"].is_null();
        let mut pods = pods["items"].as_array().into_iter().flatten().filter(is_kept);
        let address = pods.find_map(|pod| pod["status"]["podIP"].as_str().map(str::to_owned));
        address.ok_or_else(|| "memledger's pod has no address".to_owned())
    }

    /// Returns the response of memledger's pod to a request.
    fn request(&self, path: &str) -> Result<String, String> {
        let mut address = self.address.borrow_mut();
        if address.is_empty() {
            *address = self.memledger_address()?;
        }
        let url = format!("http://{address}:10853{path}");
        let response = self.run(&["curl", "--silent", "--show-error", "--fail", "--max-time", "10", &url]);
        response.text().inspect_err(|_| address.clear())
    }

    /// Returns the current metrics of memledger's pod.
    pub fn metrics(&self) -> Result<Metrics, String> {
        self.request("/metrics").map(|text| Metrics::parse(&text))
    }

    /// Polls the metrics until `check` succeeds, and returns its value.
    pub fn eventually<T>(&self, what: &str, mut check: impl FnMut(&Metrics) -> Result<T, String>) -> T {
        eventually(what, || check(&self.metrics()?))
    }

    /// Returns the kubelet's own statistics of the node and its pods.
    pub fn kubelet_summary(&self) -> Result<serde_json::Value, String> {
        let text = self.try_kubectl(&["get", "--raw", "/api/v1/nodes/node1/proxy/stats/summary"])?;
        serde_json::from_str(&text).map_err(|error| format!("{error}: {text}"))
    }

    /// Creates a namespace with a name of its own.
    pub fn namespace(&self, what: &str) -> Namespace<'_> {
        let name = unique(what);
        self.kubectl(&["create", "namespace", &name]);
        Namespace { node: self, name }
    }

    /// Stops `containerd` or `kubelet` and waits for its end.
    pub fn stop(&self, program: &str) {
        assert!(self.has_run("stop", program, &[]), "{program} stops");
    }

    /// Starts `containerd` or `kubelet`, and waits until it responds.
    pub fn start(&self, program: &str, variables: &[(&str, &str)]) {
        assert!(self.has_run("start", program, variables), "{program} starts");
    }

    /// Starts `containerd` or `kubelet` again, also one that does not run. Returns whether it responds.
    pub fn restart(&self, program: &str, variables: &[(&str, &str)]) -> bool {
        self.has_run("stop", program, &[]);
        self.has_run("start", program, variables)
    }

    /// Runs the script, and returns whether it succeeded.
    fn has_run(&self, action: &str, program: &str, variables: &[(&str, &str)]) -> bool {
        let mut command = self.script(action, &[program]);
        command.envs(variables.iter().copied()).status().is_ok_and(|status| status.success())
    }
}

/// A namespace of Kubernetes, with the pods of one test. Deleted when dropped.
pub struct Namespace<'a> {
    pub node: &'a Node,
    pub name: String,
}

impl Namespace<'_> {
    /// Creates what a file of tests/kube/pods has. Right after its namespace that fails until a controller has made the ServiceAccount.
    pub fn apply(&self, file: &str) {
        self.apply_text(&read_template(file));
    }

    pub fn apply_text(&self, text: &str) {
        let words = ["kubectl", "-n", &self.name, "apply", "-f", "-"];
        eventually("kubectl apply", || self.node.run_with_input(&words, text).text());
    }

    pub fn kubectl(&self, words: &[&str]) -> String {
        self.node.kubectl(&[&["-n", &self.name], words].concat())
    }

    pub fn container<'a>(&'a self, pod: &'a str, name: &'a str) -> PodContainer<'a> {
        PodContainer { namespace: &self.name, pod, name }
    }

    /// Returns a pod as the API server has it.
    pub fn pod(&self, name: &str) -> Result<serde_json::Value, String> {
        self.node.get(&["-n", &self.name, "pod", name])
    }

    /// Returns the status of a container of any kind; an error if it has none yet.
    pub fn status(&self, pod: &str, container: &str) -> Result<serde_json::Value, String> {
        let pod = self.pod(pod)?;
        let kinds = ["containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"];
        let mut all = kinds.iter().filter_map(|kind| pod["status"][*kind].as_array()).flatten();
        all.find(|status| status["name"] == container).cloned().ok_or_else(|| format!("{}", pod["status"]))
    }

    /// Waits until all containers of a pod run.
    pub fn runs(&self, pod: &str) {
        eventually(&format!("{pod} runs"), || {
            let pod = self.pod(pod)?;
            let ready = pod["status"]["conditions"].as_array().into_iter().flatten();
            let mut ready = ready.filter(|condition| condition["type"] == "Ready");
            match ready.next() {
                Some(condition) if condition["status"] == "True" => Ok(()),
                _ => Err(format!("{}", pod["status"])),
            }
        });
    }
}

impl Drop for Namespace<'_> {
    fn drop(&mut self) {
        let _ = self.node.try_kubectl(&["delete", "namespace", &self.name, "--wait=false"]);
    }
}

/// Returns a file of tests/kube/pods.
pub fn read_template(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kube/pods").join(format!("{file}.yaml"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
