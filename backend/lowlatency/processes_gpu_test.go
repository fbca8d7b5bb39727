//go:build gpu

package lowlatency

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/cuda"
	"github.com/euryale-ml/euryale/backend/nccl"
	"github.com/euryale-ml/euryale/rendezvous"
)

// scenario is the variable that makes this test binary a rank of a job; its value
// is the algorithm.
const scenario = "EURYALE_TEST_LOWLATENCY"

func TestMain(m *testing.M) {
	if name := os.Getenv(scenario); name != "" {
		if err := rankOf(name); err != nil {
			fmt.Println("failed:", err)
			os.Exit(3)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// rankOf is a process of a job: it reduces until that fails, and then uses its
// device.
func rankOf(name string) error {
	force, err := ParseAlgorithm(name)
	if err != nil {
		return err
	}
	env, err := rendezvous.ReadEnv(os.Getenv)
	if err != nil {
		return err
	}
	w, err := rendezvous.Join(context.Background(), env)
	if err != nil {
		return err
	}
	defer w.Close()
	inner, err := nccl.New(func(ordinal int) (nccl.Device, error) { return cuda.Open(ordinal) }).Connect(context.Background(), w)
	if err != nil {
		return err
	}
	c, err := New(inner, forced(force))
	if err != nil {
		return err
	}
	if c.Refused() != "" {
		return errors.New(c.Refused())
	}
	x := make([]float32, 1<<14)
	err = with(c, x, func(b backend.Buffer) error {
		for i := 0; ; i++ {
			if i == 10 {
				fmt.Println("under way")
			}
			if err := backend.Run(c, sum, b, b); err != nil {
				fmt.Println("error:", strings.ReplaceAll(err.Error(), "\n", " "))
				return nil // and copy the memory, which uses the device
			}
		}
	})
	if err != nil {
		return err
	}
	fmt.Println("device usable")
	return c.Close()
}

// start starts a job of processes, each on its own GPU.
func start(t *testing.T, name string, size int) []*exec.Cmd {
	t.Helper()
	secret := make([]byte, 16)
	rand.Read(secret)
	var all []*exec.Cmd
	for r := range size {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), scenario+"="+name,
			fmt.Sprintf("RANK=%d", r), fmt.Sprintf("WORLD_SIZE=%d", size),
			fmt.Sprintf("LOCAL_RANK=%d", r), fmt.Sprintf("LOCAL_WORLD_SIZE=%d", size),
			"MASTER_ADDR=127.0.0.1", "MASTER_PORT=29513",
			"EURYALE_JOB="+hex.EncodeToString(secret), "EURYALE_TOKEN="+hex.EncodeToString(secret))
		cmd.Stderr = os.Stderr
		all = append(all, cmd)
	}
	return all
}

func TestKilledRankIsNamedAndDevicesGoOn(t *testing.T) {
	size := len(needGPUs(t, 2))
	for _, a := range Algorithms()[1:] {
		t.Run(a.String(), func(t *testing.T) {
			var outs []*bufio.Scanner
			ranks := start(t, a.String(), size)
			for _, cmd := range ranks {
				out, err := cmd.StdoutPipe()
				if err != nil {
					t.Fatal(err)
				}
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
				outs = append(outs, bufio.NewScanner(out))
			}
			says := func(r int, want string) {
				outs[r].Scan()
				if !strings.Contains(outs[r].Text(), want) {
					t.Errorf("rank %d says %q, want %q in it", r, outs[r].Text(), want)
				}
			}
			for r := range ranks {
				says(r, "under way")
			}
			if t.Failed() {
				return
			}
			began, victim := time.Now(), size-1
			if err := ranks[victim].Process.Kill(); err != nil {
				t.Fatal(err)
			}
			for r := range victim {
				says(r, fmt.Sprintf("rank %d is down", victim))
				if took := time.Since(began); took > 2*time.Second {
					t.Errorf("rank %d took %v", r, took)
				}
				says(r, "device usable")
			}
		})
	}
}
