// A caller as grpc-go makes one: goroutines that share a connection.
//
// usage: go_client ADDRESS REQUEST_FILE GOROUTINES CALLS SECONDS [cancel]
//
// The file is a ModelInferRequest without an id. Each call gets an id of its own, and its answer has to
// hold that id. Prints how many were answered and, by status, how many were not. With cancel, two calls
// before each are given up: one is cancelled while it is sent, one has a deadline of a few milliseconds.
package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

const method = "/inference.GRPCInferenceService/ModelInfer"

// raw passes messages as the bytes that they are.
type raw struct{}

func (raw) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }

func (raw) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = append([]byte(nil), data...)
	return nil
}

func (raw) Name() string { return "proto" }

func main() {
	message, err := os.ReadFile(os.Args[2])
	must(err)
	connection, err := grpc.NewClient(
		"passthrough:///"+os.Args[1],
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(raw{})),
	)
	must(err)
	goroutines, calls, seconds := number(os.Args[3]), number(os.Args[4]), number(os.Args[5])
	cancels := len(os.Args) > 6
	counts := map[string]int{}
	var lock sync.Mutex
	var all sync.WaitGroup
	for i := range goroutines {
		all.Add(1)
		go func() {
			defer all.Done()
			for j := range calls {
				if cancels {
					giveUp(connection, message, j)
				}
				ended := call(connection, message, fmt.Sprintf("%04d.%06d", i, j), seconds)
				lock.Lock()
				counts[ended]++
				if cancels {
					counts["given_up"] += 2
				}
				lock.Unlock()
			}
		}()
	}
	all.Wait()
	for ended, count := range counts {
		fmt.Println(ended, count)
	}
}

func call(connection *grpc.ClientConn, message []byte, id string, seconds int) string {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(seconds)*time.Second)
	defer cancel()
	request := append(append([]byte(nil), message...), 0x1a, byte(len(id))) // field 3
	request = append(request, id...)
	var answer []byte
	if err := connection.Invoke(ctx, method, &request, &answer); err != nil {
		return status.Code(err).String()
	}
	if !bytes.Contains(answer, []byte(id)) {
		return "WrongAnswer"
	}
	return "OK"
}

func giveUp(connection *grpc.ClientConn, message []byte, number int) {
	var answer []byte
	ctx, cancel := context.WithCancel(context.Background())
	go cancel()
	_ = connection.Invoke(ctx, method, &message, &answer)
	late, end := context.WithTimeout(context.Background(), time.Duration(1+number%5)*time.Millisecond)
	defer end()
	_ = connection.Invoke(late, method, &message, &answer)
}

func number(text string) int {
	found, err := strconv.Atoi(text)
	must(err)
	return found
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
