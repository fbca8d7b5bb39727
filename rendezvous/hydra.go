package rendezvous

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// launcherProcess returns a unique name of the process that started this rank: its nearest ancestor
// without the rank's number in the environment. A shell in between has the number.
func launcherProcess(rank string) (string, error) {
	for pid := os.Getppid(); ; {
		parent, started, err := processStat(pid)
		if err != nil {
			return "", err
		}
		vars, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		isRank := false
		for v := range bytes.SplitSeq(vars, []byte{0}) {
			name, value, _ := strings.Cut(string(v), "=")
			isRank = isRank || value == rank && (name == "PMI_RANK" ||
				name == "MV2_COMM_WORLD_RANK")
		}
		if err != nil || !isRank || parent == 0 { // the process of another user is no rank
			return fmt.Sprintf("%d-%s", pid, started), nil
		}
		pid = parent
	}
}

// processStat returns the parent of a process, and when it started, in ticks
// since the machine did.
func processStat(pid int) (parent int, started string, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, "", err
	}
	// The name of the program, in brackets, may hold anything.
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	const parentField, startField = 1, 19 // counted from the state
	if len(fields) <= startField {
		return 0, "", fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	parent, err = strconv.Atoi(fields[parentField])
	return parent, fields[startField], err
}
