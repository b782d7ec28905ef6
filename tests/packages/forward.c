/* In place of the socket proxy of deploy/docker-compose.socket-proxy.yml in a test: takes its options, uses -proxysocketendpoint=PATH
 * and -proxysocketendpointfilemode=MODE, and forwards every connection to Docker's socket. It rejects nothing. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static struct sockaddr_un address(const char *path) {
  struct sockaddr_un name = {.sun_family = AF_UNIX};
  snprintf(name.sun_path, sizeof name.sun_path, "%s", path);
  return name;
}

static void copy(int from, int to) {
  char bytes[65536];
  ssize_t count;
  while ((count = read(from, bytes, sizeof bytes)) > 0) {
    for (ssize_t done = 0, put; done < count; done += put) {
      if ((put = write(to, bytes + done, count - done)) <= 0) _exit(1);
    }
  }
  shutdown(to, SHUT_WR);
  _exit(0);
}

static void forward(int client) {
  struct sockaddr_un docker = address("/var/run/docker.sock");
  int server = socket(AF_UNIX, SOCK_STREAM, 0);
  if (connect(server, (struct sockaddr *)&docker, sizeof docker)) { perror(docker.sun_path); _exit(1); }
  if (fork() == 0) copy(server, client);
  copy(client, server);
}

int main(int count, char **options) {
  const char *path = NULL;
  mode_t mode = 0600;
  for (int i = 1; i < count; i++) {
    if (!strncmp(options[i], "-proxysocketendpoint=", 21)) path = options[i] + 21;
    if (!strncmp(options[i], "-proxysocketendpointfilemode=", 29)) mode = strtol(options[i] + 29, NULL, 8);
  }
  if (!path) return 2;
  signal(SIGCHLD, SIG_IGN);
  signal(SIGPIPE, SIG_IGN);
  unlink(path);
  struct sockaddr_un own = address(path);
  int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  if (bind(listener, (struct sockaddr *)&own, sizeof own) || chmod(path, mode) || listen(listener, 64)) { perror(path); return 1; }
  for (int client; (client = accept(listener, NULL, NULL)) >= 0 || 1;) {
    if (client < 0) continue;
    if (fork() == 0) { close(listener); forward(client); }
    close(client);
  }
}
