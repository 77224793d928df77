import io.grpc.CallOptions;
import io.grpc.ClientCall;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.netty.shaded.io.grpc.netty.NettyChannelBuilder;
import io.grpc.okhttp.OkHttpChannelBuilder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;

/**
 * A caller that gives up two thirds of its calls: threads that share a connection.
 *
 * <p>usage: Canceller ADDRESS REQUEST_FILE THREADS CALLS SECONDS TRANSPORT
 *
 * <p>TRANSPORT is netty or okhttp. Of three calls one is cancelled as soon as it was sent, one has a
 * deadline of a few milliseconds, and one is to be answered: prints, by status, how those ended, and
 * how many calls were given up.
 */
public final class Canceller {
  public static void main(String[] args) throws Exception {
    byte[] message = Files.readAllBytes(Path.of(args[1]));
    int threads = Integer.parseInt(args[2]);
    int calls = Integer.parseInt(args[3]);
    int seconds = Integer.parseInt(args[4]);
    ManagedChannelBuilder<?> builder =
        args[5].equals("netty")
            ? NettyChannelBuilder.forTarget(args[0])
            : OkHttpChannelBuilder.forTarget(args[0]);
    ManagedChannel channel = builder.usePlaintext().build();
    Map<String, Integer> counts = new TreeMap<>();
    var pool = Executors.newFixedThreadPool(threads);
    for (int i = 0; i < threads; i++) {
      int thread = i;
      pool.submit(
          () -> {
            for (int j = 0; j < calls; j++) {
              String id = String.format("%04d.%06d", thread, j);
              cancelled(channel, Client.withId(message, id));
              late(channel, Client.withId(message, id), 1 + j % 5);
              String ended = Client.call(channel, message, id, seconds);
              synchronized (counts) {
                counts.merge(ended, 1, Integer::sum);
                counts.merge("given_up", 2, Integer::sum);
              }
            }
            return null;
          });
    }
    pool.shutdown();
    pool.awaitTermination(1, TimeUnit.HOURS);
    counts.forEach((ended, count) -> System.out.println(ended + " " + count));
    channel.shutdownNow();
  }

  /** Cancels a call in the same breath. */
  private static void cancelled(ManagedChannel channel, byte[] request) throws InterruptedException {
    CountDownLatch closed = new CountDownLatch(1);
    ClientCall<byte[], byte[]> call = sent(channel, request, CallOptions.DEFAULT, closed);
    call.cancel("not needed any more", null);
    closed.await();
  }

  private static void late(ManagedChannel channel, byte[] request, int milliseconds)
      throws InterruptedException {
    CountDownLatch closed = new CountDownLatch(1);
    CallOptions options =
        CallOptions.DEFAULT.withDeadlineAfter(milliseconds, TimeUnit.MILLISECONDS);
    sent(channel, request, options, closed);
    closed.await();
  }

  private static ClientCall<byte[], byte[]> sent(
      ManagedChannel channel, byte[] request, CallOptions options, CountDownLatch closed) {
    ClientCall<byte[], byte[]> call = channel.newCall(Client.INFER, options);
    call.start(
        new ClientCall.Listener<>() {
          @Override
          public void onClose(Status status, Metadata trailers) {
            closed.countDown();
          }
        },
        new Metadata());
    call.request(2);
    call.sendMessage(request);
    call.halfClose();
    return call;
  }
}
