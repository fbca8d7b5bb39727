//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/euryale-ml/euryale"
	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/backend/backendtest"
	"github.com/euryale-ml/euryale/internal/launch"
)

// The variables that make this program a process of a job.
const (
	envRole    = "SOAK_ROLE"    // what the process is; without it, it is the soak itself
	envSeed    = "SOAK_SEED"    // which job it is of
	envNumber  = "SOAK_NUMBER"  // the same
	envFailure = "SOAK_FAILURE" // the failure's name
	envRun     = "SOAK_RUN"     // different for each run of a job, to find its processes by
	envPart    = "SOAK_PART"    // which of the jobs that share a directory
	envDir     = "SOAK_DIR"     // the directory that jobs save to
)

// The roles.
const (
	roleRank       = "rank"
	roleGoroutines = "goroutines"
	roleLauncher   = "launcher"
)

// play is a process of a job. It returns the exit code.
func play(role string) int {
	seed, err1 := strconv.ParseUint(os.Getenv(envSeed), 10, 64)
	number, err2 := strconv.Atoi(os.Getenv(envNumber))
	if err := errors.Join(err1, err2); err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		return 2
	}
	j := newJob(seed, number)
	if part, err := strconv.Atoi(os.Getenv(envPart)); err == nil {
		j = j.partOf(part)
	}
	j.failure.name = os.Getenv(envFailure)
	switch role {
	case roleLauncher:
		return j.launch()
	case roleGoroutines:
		return j.asGoroutines()
	}
	return j.asRank()
}

// asRank is the process of one rank.
func (j job) asRank() int {
	rank, _ := strconv.Atoi(os.Getenv("RANK"))
	time.Sleep(j.delays[rank])
	if j.failure.name == absent && rank == j.failure.rank {
		return 0
	}
	comm, err := euryale.Init(context.Background())
	if err != nil {
		return j.say(rank, err)
	}
	fmt.Printf("soak: joined rank=%d at=%d\n", rank, time.Now().UnixMicro())
	if !j.abrupt {
		defer comm.Close() // also after a panic; the error is known, and Close again does nothing
	}
	if err = j.run(comm, &sync.Mutex{}); err == nil {
		err = comm.Close()
	}
	code := j.say(rank, err) // at once: Close may take a while
	if errors.Is(err, errLeft) {
		comm.Close() // it returns the error of the rank that leaves
	}
	return code
}

// say reports the end of a rank's process, and returns its exit code.
func (j job) say(rank int, err error) int {
	report(rank, err)
	if err == nil || errors.Is(err, errLeft) || isLocked(err) {
		return 0
	}
	if j.mode == launched {
		fmt.Fprintln(os.Stderr, "soak:", err) // launchers read it there
	}
	return 1
}

// asGoroutines is the process of all ranks.
func (j job) asGoroutines() int {
	err := euryale.Run(context.Background(), j.ranks, func(comm backend.Communicator,
		build sync.Locker) error {
		err := j.run(comm, build)
		report(comm.Rank(), err)
		if errors.Is(err, errLeft) {
			return nil
		}
		return err
	})
	if err != nil {
		fmt.Printf("soak: run error %q\n", err.Error())
		return 1
	}
	return 0
}

// launch is the process of a launcher.
func (j job) launch() int {
	program, err := os.Executable()
	if err == nil {
		env := append(os.Environ(), envRole+"="+roleRank)
		err = launch.Run(context.Background(), launch.Job{Program: program, Ranks: j.ranks,
			Env: env, Stdout: os.Stdout, Stderr: os.Stderr})
	}
	var failed *launch.Failed
	switch {
	case errors.As(err, &failed):
		fmt.Printf("soak: launcher rank=%d code=%d at=%d %q\n", failed.Rank, failed.ExitCode(),
			time.Now().UnixMicro(), err.Error())
		return failed.ExitCode()
	case err != nil:
		fmt.Printf("soak: run error %q\n", err.Error())
		return 1
	}
	return 0
}

// report says how a rank ended, and when, in one line.
func report(rank int, err error) {
	word, text := wordError, ""
	var lost *backend.Error
	var wrong *wrongError
	var differs *backendtest.WrongError
	switch {
	case err == nil:
		word = wordDone
	case errors.Is(err, errLeft):
		word = wordLeft
	case isLocked(err):
		word, text = wordLocked, err.Error()
	case errors.As(err, &wrong), errors.As(err, &differs), errors.Is(err, backend.ErrMismatch) &&
		errors.As(err, &lost):
		word, text = wordWrong, err.Error()
	default:
		text = err.Error()
	}
	fmt.Printf("soak: rank=%d %s at=%d %q\n", rank, word, time.Now().UnixMicro(), text)
}

// The words by which a rank reports its end.
const (
	wordDone   = "done"
	wordLeft   = "left"   // early, because that is its failure
	wordLocked = "locked" // because another job saves to its directory
	wordError  = "error"  // an error that blames another rank
	wordWrong  = "wrong"  // must not happen, whatever happens to another rank
)
