package testranks

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/internal/shm"
)

// Containers have 64 MiB of shared memory by default, and packages are tested several at a time. So
// the groups of a test program hold at most mostHeld when another one begins, and a group begins
// when there are roomOfRank for each rank: a hierarchical group takes that.
const (
	mostHeld   = 24 << 20
	roomOfRank = 4 << 20
	shared     = "/dev/shm"
)

// room waits until there is shared memory for P ranks: groups of other test programs give it back.
// After 20 seconds the group is tried all the same.
func room(P int) error {
	if held := held(); held > mostHeld {
		return fmt.Errorf("the open groups of this test program hold %d MiB of shared memory, and "+
			"a container may have 64 for all programs: close each group once its work is done",
			held>>20)
	}
	for range 2000 {
		r, err := shm.RoomOf(shared)
		if err != nil || r.All == 0 || r.Free >= min(uint64(P*roomOfRank), r.All/2) {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil
}

// held returns how many bytes of files on /dev/shm this process maps, 0 where there is no /proc.
func held() (nbytes int) {
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		return 0
	}
	defer maps.Close()
	sizes := map[string]int{} // by file, which each rank maps
	// 7f00-7f10 rw-s 00000000 00:19 4711 /dev/shm/#4711 (deleted)
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		f := strings.Fields(lines.Text())
		var from, to int
		if len(f) < 6 || !strings.HasPrefix(f[5], shared) {
			continue
		}
		if _, err := fmt.Sscanf(f[0], "%x-%x", &from, &to); err == nil {
			sizes[f[4]] = max(sizes[f[4]], to-from)
		}
	}
	for _, n := range sizes {
		nbytes += n
	}
	return nbytes
}
