package proctest_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// machines tries to make machines where the only command is an ip that runs a script, or none.
func machines(t *testing.T, ip string) error {
	t.Helper()
	dir := t.TempDir()
	if ip != "" {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "ip"), []byte("#!/bin/sh\n"+ip), 0o700))
	}
	t.Setenv("PATH", dir)
	g := &proctest.Ground{}
	err := g.Run(func() error {
		proctest.Machines(g, 2, proctest.Wire{})
		return nil
	})
	return errors.Join(err, g.Leave())
}

func TestWhereMachinesCannotBeMadeTestsAreSkipped(t *testing.T) {
	t.Setenv("REQUIRE_NETNS", "")
	for about, ip := range map[string]string{"no ip": "", "no right": "echo no right; exit 1"} {
		err := machines(t, ip)
		require.Fails(t, about, err, proctest.ErrLacking, "ip netns add")
	}
	t.Setenv("REQUIRE_NETNS", "1")
	err := machines(t, "")
	require.Check(t, !errors.Is(err, proctest.ErrLacking) && err != nil &&
		strings.Contains(err.Error(), "REQUIRE_NETNS=1"), "where they are required: %v", err)
}

func TestMachinesThatAreHalfMadeAreRemoved(t *testing.T) {
	t.Setenv("REQUIRE_NETNS", "")
	log := filepath.Join(t.TempDir(), "log")
	err := machines(t, `echo "$*" >>`+log+`; [ "$1" = netns ]`)
	text, _ := os.ReadFile(log)
	made, rest, _ := strings.Cut(string(text), "\n")
	hub, ok := strings.CutPrefix(made, "netns add ")
	require.Check(t, ok && errors.Is(err, proctest.ErrLacking) &&
		strings.Contains(rest, "netns delete "+hub+"\n"), "%v; ip was run with\n%s", err, text)
}
