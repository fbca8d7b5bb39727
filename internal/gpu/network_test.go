package gpu

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

// outward returns an interface that is not loopback, and its address.
func outward(t *testing.T) (name, addr string) {
	t.Helper()
	all := require.Value(net.Interfaces())(t)
	for _, i := range all {
		addrs, err := i.Addrs()
		if err != nil || i.Flags&net.FlagLoopback != 0 || i.Flags&net.FlagUp == 0 {
			continue
		}
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil {
				return i.Name, n.IP.String()
			}
		}
	}
	t.Skip("this machine has no network interface but loopback")
	return "", ""
}

// meet returns the Worlds of two ranks that meet at an address, with encrypted connections or not.
func meet(t *testing.T, addr string, tls bool) []*rendezvous.World {
	t.Helper()
	ln := require.Value(net.Listen("tcp", net.JoinHostPort(addr, "0")))(t)
	port := ln.Addr().(*net.TCPAddr).Port
	ln.Close()
	worlds, errs := make([]*rendezvous.World, 2), make(chan error, 2)
	for r := range worlds {
		go func() {
			var err error
			worlds[r], err = rendezvous.Join(context.Background(), rendezvous.Env{Job: "network",
				Rank: r, Size: 2, LocalSize: 1, Node: r, Addr: addr, Port: port,
				Token: strings.Repeat("0", 32), TLS: tls, Timeout: 20 * time.Second})
			errs <- err
		}()
	}
	for range worlds {
		require.NoError(t, <-errs)
	}
	t.Cleanup(func() {
		for _, w := range worlds[1:] {
			w.Close()
		}
		worlds[0].Close()
	})
	return worlds
}

func TestNetworkInterfaceIsTheRouteToRank0(t *testing.T) {
	name, addr := outward(t)
	worlds := meet(t, addr, false)
	home := t.TempDir()
	t.Setenv("HOME", home)
	t.Setenv("NCCL_CONF_FILE", "")
	for _, test := range []struct {
		about, set, file string
		want, says       string
	}{
		{"nothing", "", "", "=" + name, "network interface " + name + " (its route to rank 0"},
		{"the environment", "ib", "", "ib", "network interface ib (" + interfaceNames + ")"},
		{"a file", "", interfaceNames + "=ib1\n", "", "network interface ib1 (" + home},
	} {
		t.Run(test.about, func(t *testing.T) {
			t.Setenv(interfaceNames, test.set)
			require.NoError(t, os.WriteFile(filepath.Join(home, ".nccl.conf"), []byte(test.file),
				0o600))
			var said []string
			b := &Backend{Notice: func(text string) { said = append(said, text) }}
			for range 2 {
				require.NoError(t, b.chooseNetwork(newFake(nil), worlds[0]))
			}
			got := os.Getenv(interfaceNames)
			require.Equal(t, interfaceNames, got, test.want)
			require.Check(t, len(said) == 1 && strings.Contains(said[0], test.says),
				"it said %q, want once %q", said, test.says)
		})
	}
}

func TestLoopbackIsLeftToNCCL(t *testing.T) {
	t.Setenv(interfaceNames, "")
	t.Setenv("HOME", t.TempDir())
	worlds := meet(t, "127.0.0.1", false)
	require.NoError(t, (&Backend{}).chooseNetwork(newFake(nil), worlds[0]))
	got := os.Getenv(interfaceNames)
	require.Check(t, got == "", "%s is %q", interfaceNames, got)
}

func TestNCCLEncryptsAsTheJobDoes(t *testing.T) {
	_, addr := outward(t)
	for _, test := range []struct {
		about string
		tls   bool
		old   error
		keys  int
		says  string
	}{
		{"plain", false, nil, 0, "), unencrypted"},
		{"encrypted", true, nil, 2, "), encrypted"},
		{"an old NCCL", true, fmt.Errorf("%w: NCCL 2.28.3 cannot", backend.ErrUnsupported), 0,
			"), unencrypted in spite of EURYALE_TLS: unsupported: NCCL 2.28.3 cannot"},
	} {
		t.Run(test.about, func(t *testing.T) {
			t.Setenv("HOME", t.TempDir())
			t.Setenv(interfaceNames, "")
			lib := newFake(nil)
			lib.old = test.old
			var said []string
			for _, w := range meet(t, addr, test.tls) {
				b := &Backend{Notice: func(text string) { said = append(said, text) }}
				require.NoError(t, b.chooseNetwork(lib, w))
			}
			require.Check(t, len(lib.keys) == test.keys && (test.keys <= 0 || lib.keys[0] ==
				lib.keys[1] && len(lib.keys[0]) == 64),
				"the keys are %q, want %d equal ones of 64 digits", lib.keys, test.keys)
			require.Check(t, len(said) != 0 && strings.Contains(said[0], test.says),
				"it said %q, want %q", said, test.says)
		})
	}
}

func TestNCCLThatRefusesAKeyEndsConnect(t *testing.T) {
	worlds := meet(t, "127.0.0.1", true)
	lib := newFake(nil)
	lib.refusal = errors.New("NCCL: encrypt: no")
	require.Fails(t, "chooseNetwork", (&Backend{}).chooseNetwork(lib, worlds[0]), lib.refusal)
}
