package proctest

import (
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strings"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// SSH is a way to reach machines by ssh, with keys of its own.
type SSH struct {
	// Path is the directory of a program ssh for PATH. It takes more options from
	// TEST_SSH_OPTIONS, and a key from TEST_SSH_KEY: "authorized", or "other", which no host
	// knows.
	Path string

	dir string
}

// NewSSH makes the keys. Where there is no sshd, the test is skipped as without [Machines].
func NewSSH(t T) SSH {
	t.Helper()
	s := SSH{dir: t.TempDir()}
	s.Path = filepath.Join(s.dir, "bin")
	s.key(t, "host")
	s.key(t, "authorized")
	s.key(t, "other")
	ssh, err := exec.LookPath("ssh")
	if err != nil {
		lacking(t, "ssh", err)
	}
	public := require.Value(os.ReadFile(filepath.Join(s.dir, "host.pub")))(t)
	s.write(t, "known", 0o600, "10.213.77.* "+string(public))
	s.write(t, "client", 0o600, fmt.Sprintf("User root\nIdentityFile %s/${TEST_SSH_KEY}\n"+
		"IdentitiesOnly yes\nIdentityAgent none\nUserKnownHostsFile %[1]s/known\n"+
		"GlobalKnownHostsFile none\n", s.dir))
	s.write(t, "bin/ssh", 0o700, fmt.Sprintf("#!/bin/sh\nexec %s $TEST_SSH_OPTIONS -F %s/client "+
		"\"$@\"\n", ssh, s.dir))
	return s
}

// key makes a key.
func (s SSH) key(t T, name string) {
	t.Helper()
	out, err := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f",
		filepath.Join(s.dir, name)).CombinedOutput()
	if err != nil {
		lacking(t, "keys of ssh", fmt.Errorf("%w: %s", err, out))
	}
}

func (s SSH) write(t T, name string, mode os.FileMode, text string) {
	t.Helper()
	path := filepath.Join(s.dir, name)
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
	require.NoError(t, os.WriteFile(path, []byte(text), mode))
}

// withHome is mount for sshd, which also gets the machine's home and /run.
const withHome = `mount --bind "$0/home" "$1" && mount --bind "$0/run" /run && shift && ` + mount

// Home returns the directory that is the home of this user where [SSH.Serve] serves the machine.
func (m *Namespace) Home() string { return filepath.Join(m.dir, "home") }

// Serve has sshd serve a machine. Its sessions see the machine's /dev/shm, temporary directory and
// home, and variables such as "A=b".
func (s SSH) Serve(t T, m *Namespace, variables ...string) {
	t.Helper()
	sshd, err := exec.LookPath("sshd")
	if err != nil {
		if sshd, err = exec.LookPath("/usr/sbin/sshd"); err != nil {
			lacking(t, "sshd", err)
		}
	}
	me := require.Value(user.Current())(t)
	for _, dir := range []string{m.Home(), filepath.Join(m.dir, "run", "sshd")} {
		require.NoError(t, os.MkdirAll(dir, 0o755))
	}
	tmp := filepath.Join(m.dir, "tmp")
	variables = append(variables, "TMPDIR="+tmp, "XDG_RUNTIME_DIR="+tmp)
	s.write(t, m.Name, 0o600, fmt.Sprintf("ListenAddress %s\nHostKey %s/host\n"+
		"AuthorizedKeysFile %[2]s/authorized.pub\nStrictModes no\nUsePAM no\nPidFile none\n"+
		"PasswordAuthentication no\nKbdInteractiveAuthentication no\nSetEnv %s\n", m.Addr, s.dir,
		strings.Join(variables, " ")))
	cmd := exec.Command("ip", "netns", "exec", m.Name, "sh", "-c", withHome, m.dir, me.HomeDir,
		sshd, "-D", "-e", "-f", filepath.Join(s.dir, m.Name))
	log := require.Value(os.Create(filepath.Join(s.dir, m.Name+".log")))(t)
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	require.NoError(t, cmd.Start())
	m.daemon = cmd.Process.Pid
	go cmd.Wait() // it ends with the machine
	if !m.await(t, func() bool {
		text, err := os.ReadFile(log.Name())
		return err == nil && strings.Contains(string(text), "listening on")
	}) {
		text, _ := os.ReadFile(log.Name()) // for the message
		t.Fatalf("sshd does not listen on %s: %s", m.Name, text)
	}
}
