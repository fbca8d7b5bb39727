package proctest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Networks makes two network namespaces with a link between them for a test, and returns their names and
// addresses. Where that takes rights that the test does not have, it is skipped.
func Networks(t *testing.T) (names, addrs []string) {
	t.Helper()
	names = []string{fmt.Sprintf("eu%da", os.Getpid()), fmt.Sprintf("eu%db", os.Getpid())}
	addrs = []string{"10.213.77.1", "10.213.77.2"}
	t.Cleanup(func() {
		for _, name := range names {
			exec.Command("ip", "netns", "delete", name).Run() // it may not be there
		}
	})
	for _, do := range []string{
		"netns add " + names[0], "netns add " + names[1],
		"-n " + names[0] + " link add eth0 type veth peer name eth0 netns " + names[1],
		"-n " + names[0] + " address add " + addrs[0] + "/24 dev eth0", "-n " + names[1] + " address add " + addrs[1] + "/24 dev eth0",
		"-n " + names[0] + " link set lo up", "-n " + names[1] + " link set lo up",
		"-n " + names[0] + " link set eth0 up", "-n " + names[1] + " link set eth0 up",
	} {
		if out, err := exec.Command("ip", strings.Fields(do)...).CombinedOutput(); err != nil {
			t.Skipf("this machine makes no network namespaces: ip %s: %v: %s", do, err, out)
		}
	}
	return names, addrs
}

// Elsewhere makes a command one that runs in a network namespace, on what looks like a machine of its
// own: it has another boot ID than the rest.
func Elsewhere(t *testing.T, network string, cmd *exec.Cmd) *exec.Cmd {
	t.Helper()
	boot := filepath.Join(t.TempDir(), "boot_id")
	if err := os.WriteFile(boot, []byte(network+"\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	const mount = `mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"`
	args := append([]string{"netns", "exec", network, "unshare", "--mount", "sh", "-c", mount, boot}, cmd.Args...)
	there := exec.Command("ip", args...)
	there.Env = cmd.Env
	return there
}
