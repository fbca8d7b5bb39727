package group_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/group"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

// networks has the names of the network namespaces that the ranks of a job take in turn.
const networks = "EURYALE_TEST_NETWORKS"

func TestMain(m *testing.M) { proctest.Main(m, rank) }

// rank calls, says so, and once a rank is lost finds the others by another server.
func rank(scenario string) error {
	if names := os.Getenv(networks); names != "" {
		return elsewhere(strings.Fields(names))
	}
	e, err := rendezvous.ReadEnv(os.Getenv)
	if err != nil {
		return err
	}
	w, err := rendezvous.Join(context.Background(), e)
	if err != nil {
		return err
	}
	defer w.Close()
	if scenario == "interface" {
		i, err := w.Interface()
		fmt.Println("interface", i.Name)
		return err
	}
	b, err := onBoard(w)
	if err != nil {
		return err
	}
	defer b.Release()
	const calls = 500
	for seq := uint64(1); seq <= calls; seq++ {
		b.Post(header(seq, 8), true)
	}
	if err := until(func() bool { n, _ := b.Compare(calls); return n == calls }); err != nil {
		return err
	}
	fmt.Println("calls at", b.Addr())
	<-w.Down()
	b.Note(1, fmt.Appendf(nil, "rank %d", w.Rank))
	for r := range w.Size {
		if r == w.Failure().Rank {
			continue
		}
		if err := until(func() bool { _, ok := b.Noted(r, 1); return ok }); err != nil {
			return fmt.Errorf("the note of rank %d: %w", r, err)
		}
	}
	fmt.Println("has met the others after", w.Failure())
	return nil
}

// elsewhere starts this rank again in the network namespace that is its turn.
func elsewhere(names []string) error {
	ip, err := exec.LookPath("ip")
	if err != nil {
		return err
	}
	r, err := strconv.Atoi(os.Getenv("RANK"))
	if err != nil {
		return err
	}
	env := slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, networks) || strings.HasPrefix(v, "LOCAL_")
	})
	env = append(env, fmt.Sprintf("LOCAL_RANK=%d", r/len(names)), "LOCAL_WORLD_SIZE=2")
	return syscall.Exec(ip, []string{"ip", "netns", "exec", names[r%len(names)], os.Args[0]}, env)
}

// onBoard returns the board of a rank, once it knows where the others are.
func onBoard(w *rendezvous.World) (*group.Sockets, error) {
	members := make([]int, w.Size)
	for r := range members {
		members[r] = r
	}
	b, err := group.NewSockets(w, "test", members, w.Rank)
	if err != nil {
		return nil, err
	}
	told, err := w.AllGather(context.Background(), "boards", []byte(b.Addr()))
	if err != nil {
		return nil, errors.Join(err, b.Release())
	}
	addrs := make([]string, w.Size)
	for r := range told {
		addrs[r] = string(told[r])
	}
	b.Open(addrs)
	return b, nil
}

func until(come func() bool) error {
	for end := time.Now().Add(20 * time.Second); !come(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			return errors.New("not within 20 s")
		}
	}
	return nil
}

// survive kills the server of a job of 4 processes; the others must meet again.
func survive(t *testing.T, at []string, env ...string) {
	ps := proctest.Start(t, "calls", 4, env...)
	for r, p := range ps {
		p.Says(t, "calls at "+at[r%len(at)])
	}
	ps[0].Process.Kill()
	for _, p := range ps[1:] {
		p.Says(t, "has met the others after rank 0 is down")
	}
}

func TestSocketsOfProcesses(t *testing.T) { survive(t, []string{"127.0.0.1:"}) }

// Ranks that reach each other by a network only, as on two machines.
func TestSocketsBetweenNetworks(t *testing.T) {
	m := proctest.Machines(t, 2, proctest.Wire{})
	survive(t, []string{m[0].Addr + ":", m[1].Addr + ":"}, networks+"="+m[0].Name+" "+m[1].Name,
		"MASTER_ADDR="+m[0].Addr)
}

// Ranks know which of several network interfaces leads to the other machines.
func TestInterfaceBetweenNetworks(t *testing.T) {
	machines := proctest.Machines(t, 2, proctest.Wire{})
	for i, m := range machines {
		for _, do := range []string{
			"link add bridge0 type veth peer name far0", fmt.Sprintf(
				"address add 10.213.%d.1/24 dev bridge0", 80+i),
			"link set bridge0 up", "link set far0 up",
		} {
			out, err := exec.Command("ip", append([]string{"-n", m.Name},
				strings.Fields(do)...)...).CombinedOutput()
			require.That(t, err == nil, "ip %s: %v: %s", do, err, out)
		}
	}
	for _, p := range proctest.Start(t, "interface", 4,
		networks+"="+machines[0].Name+" "+machines[1].Name, "MASTER_ADDR="+machines[0].Addr) {
		p.Says(t, "interface eth0")
	}
}
