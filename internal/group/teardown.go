package group

import (
	"fmt"
	"os"
	"time"
)

// Teardown ends, in stages, the use of memory that ranks of one machine reach in each other:
// a rank gives its own back once the others have stopped using it, or their processes are dead.
// It goes on after the group has ended, and needs no World. The stages are on the board in
// shared memory: on a device the news might queue behind work of any length.
type Teardown struct {
	board *Memory
	lives []int // by rank: see lifeOf
}

// NewTeardown returns this rank's part. processes are what [Process] returned on each rank.
func (m *Memory) NewTeardown(processes []string) *Teardown {
	t := &Teardown{board: m}
	for _, p := range processes {
		t.lives = append(t.lives, lifeOf(p))
	}
	return t
}

// Reach shows that this rank has come to a stage, from 1, and returns once the ranks that it
// awaits have come there, too, or are dead. It may take as long as they live.
func (t *Teardown) Reach(stage uint32, awaits func(r int) bool) {
	t.board.mine.stage.Store(stage)
	for r := range t.lives {
		for pause := 50 * time.Microsecond; awaits(r) && !t.reached(r, stage); pause = min(2*pause,
			longestPause) {
			time.Sleep(pause)
		}
	}
}

// longestPause is between two looks at a rank, which may go on as long as that rank does.
const longestPause = 10 * time.Millisecond

func (t *Teardown) reached(r int, stage uint32) bool {
	return t.board.page(r).stage.Load() >= stage || dead(t.lives[r])
}

// Close ends the part of this rank.
func (t *Teardown) Close() {
	for _, life := range t.lives {
		closeProcess(life)
	}
	t.lives = nil
}

// Process identifies this process. Its number alone is not enough where ranks run in
// containers. If the namespace is not known, ranks of one process pass for ranks of several.
func Process() string {
	namespace, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		start, _ := os.ReadFile("/proc/self/stat") // it has the time when the process began
		namespace = string(start)
	}
	return fmt.Sprintf("%s/%d", namespace, os.Getpid())
}

// In place of descriptors of processes.
const (
	living = -1 - iota // as far as anybody can tell
	gone
)
